"""Conversion of weights from and to Hugging Face's layout."""
