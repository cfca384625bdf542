"""What a Llama-family model is made of, and how its layers are shared out over stages.

The two descriptions that models come with are read in ``from_hf`` and ``from_gguf``.
"""

from dataclasses import dataclass, field
from itertools import pairwise

from .rope import RopeScaling


class ModelError(ValueError):
    """A model that cannot be served, in one sentence for whoever started the server."""


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Shape of a decoder with RMSNorm, rotary positions, grouped-query attention and a gated MLP.

    ``qkv_bias``, ``output_bias`` and ``mlp_bias`` say which linear layers add a bias, ``qk_norm`` whether each head
    of queries and keys is normalised. ``windows``: for each layer, how many keys a query sees, its own included, and
    0 for all; empty where no layer has a window.
    """

    vocab_size: int
    hidden_size: int
    ffn_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_len: int
    tied: bool
    rope: RopeScaling = field(default_factory=RopeScaling)
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "ffn_size", "layers", "heads", "kv_heads", "head_dim", "max_len"):
            if getattr(self, name) < 1:
                raise ModelError(f"the model's {name} is {getattr(self, name)}, it must be at least 1")
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} attention heads cannot share {self.kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"a head of {self.head_dim} dimensions has no rotary halves")
        if self.rope.kind == "dynamic" and self.head_dim < 4:
            raise ModelError(
                f"a head of {self.head_dim} dimensions has no frequency that dynamic scaling could change"
            )
        if self.windows and len(self.windows) != self.layers:
            raise ModelError(f"{len(self.windows)} sliding windows are given for {self.layers} layers")

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def head_in_layers(self) -> float:
        """The head's weights as a multiple of a layer's."""
        attention = self.hidden_size * 2 * (self.q_size + self.kv_size)
        return self.vocab_size * self.hidden_size / (attention + 3 * self.hidden_size * self.ffn_size)


EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Canonical (Hugging Face) name and shape of every tensor of the model."""
    hidden, ffn, q_size, kv_size = config.hidden_size, config.ffn_size, config.q_size, config.kv_size
    linear: dict[str, tuple[int, int, bool]] = {
        "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.output_bias),
        "mlp.gate_proj": (ffn, hidden, config.mlp_bias),
        "mlp.up_proj": (ffn, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, ffn, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not config.tied:
        shapes[HEAD] = (config.vocab_size, hidden)
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, (rows, columns, has_bias) in linear.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def split_layers(layers: int, stages: int, head_in_layers: float = 0.0) -> list[range]:
    """The layers of each stage, so that the stages cost as nearly the same as whole layers allow.

    The last stage also computes the head, whose weights are ``head_in_layers`` times a layer's. It counts half: all
    rows of an iteration of decodes need it, few rows of a chunk of a prompt do. Looking up embeddings costs nothing.
    Where shares differ, earlier stages have one more.
    """
    if not 1 <= stages <= layers:
        raise ModelError(
            f"{layers} layers cannot be split over {stages} stages; possible: 1 to {layers}, each has a layer"
        )
    extra = head_in_layers / 2 if stages > 1 else 0.0

    def cost(last: int) -> tuple[float, float]:
        """The slowest stage, then how uneven the stages are."""
        share, rest = divmod(layers - last, stages - 1)
        shares = [share + 1] * rest + [share] * (stages - 1 - rest) + [last + extra]
        return max(shares), sum(each * each for each in shares)

    last = min(range(1, layers - stages + 2), key=cost) if stages > 1 else layers
    share, rest = divmod(layers - last, max(stages - 1, 1))
    bounds = [stage * share + min(stage, rest) for stage in range(stages)] + [layers]
    return [range(begin, end) for begin, end in pairwise(bounds)]


def describe_stage(layers: range, stage: int, stages: int) -> str:
    """One line on what a stage holds."""
    span = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
    embedding = " + embedding" if stage == 0 else ""
    head = " + head" if stage == stages - 1 else ""
    return f"stage {stage} of {stages}: {span}{embedding}{head}"
