"""Several ranks: processes that each hold a part of a model, and how they exchange tensors."""
