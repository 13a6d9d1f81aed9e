"""What unset sampling fields mean over HTTP: the checkpoint's generation_config.json, as for vLLM.

Where that file says nothing, OpenAI's own defaults hold: temperature 1, the whole vocabulary. gRPC
is different: there an unset temperature is greedy.
"""

from pathlib import Path

from core.errors import InvalidRequest, ModelError
from core.request import SamplingParams
from router.http.readers import number, top_k
from router.request import Defaults
from router.text.tokenizer import read_json

FILE = "generation_config.json"


def checkpoint_defaults(directory: Path) -> Defaults:
    """The defaults of the checkpoint in `directory`.

    Raises:
        ModelError: the file holds a value that no request could have.
    """
    said = read_json(directory / FILE)

    def value(name: str, otherwise: float) -> object:
        return otherwise if said.get(name) is None else said[name]

    try:
        defaults = Defaults(
            temperature=number("temperature", value("temperature", 1.0)),
            top_k=top_k("top_k", value("top_k", 0)),
            top_p=number("top_p", value("top_p", 1.0)),
            repetition_penalty=number("repetition_penalty", value("repetition_penalty", 1.0)),
        )
        SamplingParams(
            temperature=defaults.temperature,
            top_k=defaults.top_k,
            top_p=defaults.top_p,
            repetition_penalty=defaults.repetition_penalty,
        )
    except InvalidRequest as error:
        raise ModelError(f"{directory / FILE}: {error}") from error
    return defaults
