"""What every process group promises, and what each of them needs to keep it."""
