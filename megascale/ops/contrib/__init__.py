"""Rare recipes of quantized GEMMs, which use what a plug-in may."""
