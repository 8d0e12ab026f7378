"""On-disk format of a checkpoint: named global tensors, safetensors files with checksums, and the manifest."""
