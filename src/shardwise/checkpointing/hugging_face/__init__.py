"""What Hugging Face's files look like beside and beyond their tensors."""
