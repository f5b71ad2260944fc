"""The layers that every decoder is built from. They know ops and configs, no family and no request."""
