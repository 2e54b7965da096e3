"""What the compilers of TPUs and GPUs make of a program, on a machine that has neither."""
