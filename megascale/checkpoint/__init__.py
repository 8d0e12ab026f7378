"""State out and in: by global name and global box, so that any layout reads what any other wrote."""
