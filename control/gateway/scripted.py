"""Text for the scripted worker, which has token ids but no language: for tests of everything but the model.

The first 256 ids are bytes, every other one is its own number with a space before it.
"""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from .detokenizer import Decoding
from .tokenizer import TextModel

#: The model name on the command line.
SCRIPTED = "scripted"
#: As many ids as the scripted worker has unless told.
VOCABULARY = 50_000
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def scripted_text_model() -> TextModel:
    """A tokenizer over bytes that can also show any other id."""
    # "Ġ" is how a byte-level vocabulary spells a space.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    vocabulary |= {f"Ġ{index}": index for index in range(len(letters), VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TextModel(
        tokenizer=tokenizer,
        decoding=Decoding(tokenizer),
        chat_template=_TEMPLATE,
        specials={},
        eos_ids=(),
        bos_id=None,
        max_token_bytes=8,
    )
