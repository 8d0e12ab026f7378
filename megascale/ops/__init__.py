"""Operations on one device, without communication: a module per operation, and modules per kernel library."""
