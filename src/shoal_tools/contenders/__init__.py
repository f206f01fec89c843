"""The training that `shoal bench` compares with: tuned DDP, FSDP2 and communication hooks."""
