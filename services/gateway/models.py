"""The served models, each with its tokenizer, template and names.

The request's `model` field is read before the rest of the body, since the parser belongs to a model.
"""

from collections.abc import Iterator, Mapping

import msgspec

from services.gateway.config import GatewayConfig
from services.gateway.errors import unknown_model
from services.gateway.openai.admission import Acceptance, names_of
from services.gateway.openai.tokenize import Tokenization
from services.gateway.text.tokenizer import Codec, Vocabulary


class ServedModel:
    """One served model."""

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
    """The served models in configured order; the first is the default."""

    def __init__(self, served: Mapping[str, ServedModel]) -> None:
        """`served` maps names to models; at least one."""
        self._served = dict(served)
        self._by_name = {name: model for model in served.values() for name in model.names}
        self.first = next(iter(self._served.values()))

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._served.values())

    @property
    def names(self) -> tuple[str, ...]:
        """All accepted names: the models' own, then aliases."""
        return (*self._served, *(name for name in self._by_name if name not in self._served))

    def find(self, name: str) -> ServedModel:
        """Return the model of that name. Raises UnknownModel."""
        found = self._by_name.get(name)
        if found is None:
            raise unknown_model(name, self.names)
        return found

    def of(self, body: bytes) -> ServedModel:
        """Return the model that the body names; if it names none or is malformed, the first. Raises
        UnknownModel."""
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
