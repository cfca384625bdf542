"""The hello of a small worker that serves alone."""

from evenflow.control.wire import Hello

WORKER = Hello(
    version=1,
    replica=0,
    stage=0,
    rank=0,
    stages=1,
    pid=7,
    model="m",
    eos_ids=(),
    block_size=16,
    num_blocks=64,
    max_tokens=256,
    num_slots=64,
    max_model_len=256,
    vocab_size=100,
)
