"""What is measured on a card: `check` is the whole of it, bench/gpu_check.sh starts it."""
