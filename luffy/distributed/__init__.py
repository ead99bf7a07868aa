"""More than one process: who is there, what each one does, sharded weights, and how the processes start."""
