"""Random programs, run under policies and judged by float64: finds wrong numbers from outside.

python -m tests.random_programs --seed 0 --n 20 --policy mixed_bfloat16 --class linen --minimize
"""
