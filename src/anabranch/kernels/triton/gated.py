"""The gated activations on tiles in registers, for kernels that apply them in their epilogue."""

import triton
import triton.language as tl


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) · up, in fp32."""
    if ACTIVATION == "silu":
        return gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "gelu_tanh":
        # ½ (1 + tanh u) = sigmoid(2u), which needs one exponential.
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        tl.static_assert(ACTIVATION == "clamped_swiglu")
        gate, up = tl.minimum(gate, 7.0), tl.minimum(tl.maximum(up, -7.0), 7.0)
        return gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
