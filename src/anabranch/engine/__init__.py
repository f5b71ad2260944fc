"""Which requests run next, where their keys and values are, and the steps that compute them."""
