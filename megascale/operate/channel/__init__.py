"""How processes of a job reach each other: secret, sealed connections, RPC, the job's store. No torch."""
