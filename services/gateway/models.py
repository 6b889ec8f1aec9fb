"""The models that are served: each with its tokenizer, its template and its names.

Which one a request is for, `model` in its body says. It is looked for before the body is read, as what reads
it belongs to a model.
"""

from collections.abc import Iterator, Mapping

import msgspec

from services.gateway.config import GatewayConfig
from services.gateway.errors import unknown_model
from services.gateway.openai.admission import Acceptance, names_of
from services.gateway.openai.tokenize import Tokenization
from services.gateway.text.tokenizer import Codec, Vocabulary


class ServedModel:
    """One of them."""

    def __init__(self, config: GatewayConfig, codec: Codec) -> None:
        """`config` is the gateway's, with this model's `served_name` and `model`."""
        self.config = config
        self.name = config.served_name
        self.names = names_of(config)
        self.acceptance = Acceptance(config, codec)
        self.vocabulary = Vocabulary(codec.tokenizer)
        self.tokenization = Tokenization(
            self.names, codec, self.acceptance.threads, self.vocabulary, config.max_messages
        )


class _Named(msgspec.Struct):
    model: str | None = None


_read = msgspec.json.Decoder(_Named).decode


class Models:
    """In the order in which they are configured; the first is that of requests that need not name one."""

    def __init__(self, served: Mapping[str, ServedModel]) -> None:
        """By name; at least one."""
        self._served = dict(served)
        self._by_name = {name: model for model in served.values() for name in model.names}
        self.first = next(iter(self._served.values()))

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._served.values())

    @property
    def names(self) -> tuple[str, ...]:
        """All that clients may say: the models' own, then aliases."""
        return (*self._served, *(name for name in self._by_name if name not in self._served))

    def find(self, name: str) -> ServedModel:
        """Raises UnknownModel."""
        found = self._by_name.get(name)
        if found is None:
            raise unknown_model(name, self.names)
        return found

    def of(self, body: bytes) -> ServedModel:
        """The one that a request names; the first where it names none, or cannot be read, which that one's
        reader will say. Raises UnknownModel."""
        if len(self._served) == 1:
            return self.first
        try:
            name = _read(body).model
        except msgspec.DecodeError:
            return self.first
        return self.first if name is None else self.find(name)

    def close(self) -> None:
        for model in self:
            model.acceptance.close()
