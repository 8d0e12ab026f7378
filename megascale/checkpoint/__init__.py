"""Checkpoints: named global tensors cut into shards, so that any layout reads a checkpoint of any other.

- save: `Checkpoints.save`, and in the background `start_save`, `poll_save`, `complete_save` (`checkpoints.py`); two
  stages, a copy to shared memory and a writer process (`save/`)
- load: `Checkpoints.resume` and `load_weights` (`checkpoints.py`, `load/`); whole tensors: `read_tensor` (`offline.py`)
- latest: `complete_checkpoints` of a folder, oldest first; `find_checkpoint` of a path (`folders.py`)
- prune: `Checkpoints.prune`, and `prune` of a folder (`folders.py`)
- verify: `verify` (`offline.py`)

`format/` defines the files, `memory/` the copies in host memory, which a run without them does not load, and
`collective_errors.py` errors that every rank raises together.
"""
