"""The training program as any one rank of any job, on one computer: fake tensors, groups that carry nothing."""
