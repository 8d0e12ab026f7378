"""Saving: a rank copies its state to shared memory, and a writer process stores the copy while training goes on."""
