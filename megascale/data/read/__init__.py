"""Token datasets on disk or remote storage, and the indices of their epochs."""
