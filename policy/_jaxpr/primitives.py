"""Autocast's category of each primitive of JAX, by its name; one that is not listed is opaque.

Dispatch is on names, because the objects behind them move and split between JAX versions.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable

_TABLE: dict[str, dict[str, str]] = {
    # The operands are cast to compute_dtype: what matrix units run.
    "compute": {
        "attention": "dot_product_attention_fwd dot_product_attention_fwd_wrapper",
        "conv": "conv_general_dilated",
        "matmul": "dot_general ragged_dot_general",
        "matmul-lowrank": "symmetric_product",
    },
    # Half operands are widened: sums, and functions whose error or range half precision can not bear.
    "fp32": {
        "collective-reduce": """
            psum psum_done psum_invariant psum_invariant_start psum_start reduce_scatter reduce_scatter_done
            reduce_scatter_start unreduced_psum unreduced_psum_start unreduced_reduce_scatter
            unreduced_reduce_scatter_start
        """,
        "fft": "fft",
        "linalg": """
            cholesky cholesky_update custom_linear_solve eig eigh geqp3 geqrf hessenberg householder_product lu
            lu_pivots_to_permutation ormqr qr schur svd triangular_solve tridiagonal tridiagonal_solve
        """,
        "reduction": """
            cumlogsumexp cumprod cumsum reduce reduce_prod reduce_sum reduce_window reduce_window_sum
            scatter-add scatter-mul scatter-sub select_and_gather_add select_and_scatter_add
        """,
        "sparse": """
            bcoo_dot_general bcoo_dot_general_sampled bcoo_spdot_general bcoo_sum_duplicates bcsr_dot_general
            coo_matmat coo_matvec coo_spmm coo_spmv csr_matmat csr_matvec csr_spmm csr_spmv spsolve
        """,
        "special": """
            _copysign bessel_i0e bessel_i1e digamma igamma igamma_grad_a igammac lgamma nextafter
            one_minus_square polygamma polynomial regularized_incomplete_beta zeta
        """,
        "transcendental": """
            acos acosh asin asinh atanh cosh erf_inv exp exp2 expm1 integer_pow log log1p log2 pow reciprocal
            rsqrt sinh square tan
        """,
        "trig": "cos sin",
    },
    # Operands that mix: the rules of `policy.autocast.values.common_dtype`.
    "promote": {
        "arith": "add add_any atan2 div mul rem sub",
        "compare": "eq eq_to ge gt le le_to lt lt_to ne",
        "complex": "complex",
        "minmax": "clamp max min",
        "ref": "accum_grad_in_ref addupdate masked_swap store swap",
        "select": "select_n",
        "structural": """
            concatenate dynamic_update_slice pad scatter scatter-max scatter-min select_and_scatter stack
        """,
    },
    # Runs in the dtype that its operand has: moves numbers, compares them, or is bounded and smooth.
    "passthrough": {
        "bounded-activation": "atan erf erfc logistic tanh",
        "collective-move": """
            all_gather all_gather_done all_gather_invariant all_gather_reduced all_gather_reduced_start
            all_gather_start all_to_all all_to_all_done all_to_all_start pmax pmin ppermute ppermute_done
            ppermute_start precv psend ragged_all_to_all unreduced_pmax unreduced_pmin
        """,
        "complex": "conj imag real",
        "grad-barrier": """
            custom_lin dce_sink materialize name optimization_barrier pin remat_opt stage stop_gradient tie unpin
        """,
        "inspect": "is_finite",
        "layout": """
            bcoo_transpose broadcast_in_dim broadcast_to copy dynamic_slice gather layout_cast layout_constraint
            relayout reshape rev roll slice split squeeze tile transpose unstack
        """,
        "order": """
            approx_top_k argmax argmin cummax cummin mosaic_gpu_reduce_max mosaic_gpu_reduce_min reduce_max
            reduce_min reduce_window_max reduce_window_min sort top_k
        """,
        "ref": "get load masked_load",
        "root": "cbrt sqrt",
        "sharding": """
            device_put global_array_to_host_local_array has_memory_space host_local_array_to_global_array
            inspect_sharding pbroadcast pbroadcast_done pbroadcast_dynamic
            pbroadcast_start preduced pvary reduced_vary_cast reduced_vary_cast_p remove_memory_space reshard
            sharding_constraint vary_unreduced_cast vary_unreduced_cast_p with_memory_space_constraint
        """,
        "sign": "abs ceil floor neg round sign",
        "sparse-layout": """
            bcoo_extract bcoo_fromdense bcoo_sort_indices bcoo_todense bcsr_extract bcsr_fromdense bcsr_todense
            coo_fromdense coo_todense csr_fromdense csr_todense todense
        """,
    },
    # The author chose the dtypes: they are respected.
    "explicit": {
        "bits": "bitcast bitcast_convert_type reduce_precision stochastic_round",
        "cast": "convert_element_type",
        "fp8": """
            dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd
            dot_product_attention_fp8_fwd_wrapper scaled_dot scaled_matmul scaled_matmul_wrapper
        """,
    },
    # Holds programs, which are rewritten too.
    "control": {
        "call": """
            call checkpoint closed_call cond core_call custom_jvp_call custom_jvp_call_jaxpr custom_vjp_call
            eval_jaxpr jaxpr_call jit named_call remat2 scan shard_map while xla_metadata_call
        """,
    },
    # Gets its operands in the dtypes that it was traced with.
    "opaque": {
        "attention": "splash_attention splash_attention_tangent",
        "attention-bwd": "dot_product_attention_bwd dot_product_attention_bwd_wrapper",
        "call": """
            call_hi_primitive call_hi_primitive_linearized composite core_map custom_fusion custom_vmap_call
            linear_call mpmd_map run_state
        """,
        "host": "debug_callback debug_print io_callback pure_callback trace_value",
        "kernel": """
            call_exported cudnn_fusion custom_partitioning emit_pipeline ffi_call mosaic_gpu_p pallas_call
            pipeline_body run_scoped tpu_custom_call
        """,
        "kernel-internal": """
            add_dependency async_copy_scales_to_tmem async_copy_smem_to_tmem async_copy_sparse_metadata_to_tmem
            async_load async_prefetch async_store_smem async_store_tmem atomic_cas atomic_rmw barrier_arrive
            barrier_arrive_and_wait barrier_test barrier_wait commit_group commit_smem commit_tmem conv
            copy_gmem_to_smem copy_smem_to_gmem debug_barrier debug_barrier_p delay dma_start dma_wait
            einshape_lo elementwise_inline_asm elementwise_inline_asm_p griddepcontrol_launch_dependents
            griddepcontrol_wait inline_mgpu inline_mgpu_p matmul_acc_lhs matmul_lhs_fifo matmul_pop
            matmul_pop_fifo matmul_push_rhs mgpu_atomic_store mma mosaic_gpu_reduce_prod mosaic_gpu_reduce_sum
            multimem_load_reduce multimem_store num_programs pack_dtype pack_elementwise print_layout program_id
            query_cluster_cancel semaphore_read semaphore_signal semaphore_signal_multicast
            semaphore_signal_parallel semaphore_wait set_max_registers set_max_registers_p tcgen05_commit_arrive
            tcgen05_mma try_cluster_cancel unpack_dtype unpack_elementwise wait_gmem_to_smem wait_load_tmem
            wait_smem_to_gmem wgmma wgmma_accumulator_deref wgmma_accumulator_deref_p wgmma_accumulator_store
            wgmma_accumulator_store_p wgmma_ref wgmma_wait
        """,
    },
    # Integers, keys, tokens and effects: nothing to cast.
    "exempt": {
        "call": "platform_index",
        "create": """
            after_all axis_index create_linear create_token dim_as_value dimension_size empty empty2 iota
            zeros_like
        """,
        "edtype": "from_edtype to_edtype",
        "effects": """
            box_get box_set check empty_ref free_ref freeze get_barrier_semaphore get_global get_variable
            log_extend log_read new_box new_log new_ref new_variable set_variable shape_assertion unreachable
            xla_metadata_value
        """,
        "int/bool": """
            and clz mulhi not or population_count reduce_and reduce_or reduce_xor shift_left
            shift_right_arithmetic shift_right_logical xor
        """,
        "layout-hint": "max_contiguous multiple_of",
        "rng": """
            iota_2x32_shape philox2x32 philox4x32 prng_join prng_random_bits prng_seed prng_split random_bits
            random_clone random_fold_in random_gamma random_seed random_split random_unwrap random_wrap
            rng_bit_generator rng_uniform threefry2x32 threefry4x32
        """,
    },
}

CATEGORIES = tuple(_TABLE)
CATEGORY_OF: dict[str, str] = {
    name: category for category, kinds in _TABLE.items() for names in kinds.values() for name in names.split()
}
# What compute_dtype is for, beside what the table says: reported where it stays in float32.
MATMULS = frozenset(_TABLE["compute"]["matmul"].split() + _TABLE["compute"]["conv"].split())


def names_of(category: str, kind: str) -> tuple[str, ...]:
    """The primitives of one kind in a category."""
    return tuple(_TABLE[category][kind].split())


@functools.cache
def kernels() -> frozenset[str]:
    """Primitives whose programs are of another machine's language: what they hold is no part of a jaxpr's own."""
    return frozenset((*names_of("opaque", "kernel"), *names_of("opaque", "kernel-internal")))


def category_of(name: str) -> str | None:
    """The category of a primitive, or None of one that is not known."""
    return CATEGORY_OF.get(name)


def known_primitives(names: Iterable[str], what: str) -> frozenset[str]:
    """The names themselves, each checked to be a primitive of the table.

    Raises:
      TypeError: `names` is a string, or holds what is none.
      ValueError: a name that is no primitive's, with the nearest that are.
    """
    if isinstance(names, str):
        raise TypeError(
            f"{what} should be a collection of primitive names, as ({names!r},), but got the string itself."
        )
    checked = frozenset(names)
    for name in checked:
        if not isinstance(name, str):
            raise TypeError(f"{what} should hold names of primitives, but got {name!r}.")
        if name not in CATEGORY_OF:
            near = difflib.get_close_matches(name, CATEGORY_OF, n=3)
            raise ValueError(
                f"{what} names {name!r}, which is no primitive of JAX's that is known here. "
                f"Nearest: {', '.join(near) if near else 'none'}."
            )
    return checked
