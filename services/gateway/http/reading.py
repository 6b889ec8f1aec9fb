"""Turns a path and a body into a response, also for requests that another gateway had read before."""

from dataclasses import dataclass, replace
from functools import partial
from secrets import token_bytes

from services.gateway.config import GatewayConfig
from services.gateway.exchange import Deadline
from services.gateway.http.completion_response import CompletionResponse, Lasting
from services.gateway.http.middleware import RequestRecord
from services.gateway.http.surfaces import SURFACES, Naming
from services.gateway.lasting.desk import MakeAnswer
from services.gateway.models import Models, ServedModel
from services.gateway.openai.admission import AdmittedRequest
from services.gateway.openai.replies import AnswerWriter
from services.gateway.openai.response_store import ResponseStore
from services.gateway.sessions import Sessions
from shared.clock import monotonic_s
from shared.messages.sequence import pack_tokens, unpack_tokens
from shared.messages.shadows import Shadow


@dataclass(frozen=True, slots=True)
class Reading:
    """A request that was read and admitted."""

    served: ServedModel
    job: AdmittedRequest
    writer: AnswerWriter
    answer_id: str
    created: int


class RequestReader:
    """Reads requests and makes their responses."""

    def __init__(
        self, sessions: Sessions, models: Models, config: GatewayConfig, store: ResponseStore | None
    ) -> None:
        self._sessions = sessions
        self._models = models
        self._config = config
        self._store = store

    async def read(
        self, path: str, body: bytes, record: RequestRecord, as_before: Shadow | None = None
    ) -> Reading:
        """Read and admit a request; `as_before` is another gateway's copy. Raises as admission does."""
        served = self._models.of(body)
        limit = partial(self._sessions.context_tokens, self._config.admit_timeout_s, served.name)
        naming = Naming(record, served.config, self._store)
        if as_before is not None:
            naming = replace(naming, answer_id=as_before.answer_id, created_s=as_before.created)
        else:
            naming = replace(naming, created_s=naming.created)
        job, writer = await SURFACES[path](served.acceptance, body, limit, naming)
        if as_before is not None:
            job = replace(
                job,
                prompts=tuple(tuple(unpack_tokens(prompt)) for prompt in as_before.prompts),
                samplings=as_before.samplings,
            )
        record.note_accepted(job)
        record.model = served.name
        record.figures = self._sessions.figures.of(served.name)
        return Reading(served, job, writer, naming.id(job), naming.created)

    def answer(
        self, reading: Reading, record: RequestRecord, deadline: Deadline, lasting: Lasting | None = None
    ) -> CompletionResponse:
        """Return the response to the request."""
        return CompletionResponse(
            self._sessions, reading.job, reading.writer, record, deadline, reading.served, lasting
        )

    async def read_again(self, shadow: Shadow) -> MakeAnswer:
        """Read another gateway's request; return the maker of its response. Raises as admission does."""
        record = RequestRecord("POST", shadow.path, tenant=shadow.key, owner=shadow.tenant)
        record.request_id = shadow.request_id
        deadline = Deadline(monotonic_s(), shadow.deadline_in_s)
        reading = await self.read(shadow.path, shadow.body, record, shadow)
        return partial(self.answer, reading, record, deadline)


def shadow_of(
    reading: Reading,
    record: RequestRecord,
    deadline: Deadline,
    *,
    path: str,
    body: bytes,
    names: tuple[bytes, ...],
    fingerprint: bytes,
    is_asked_for: bool,
    is_background: bool = False,
) -> Shadow:
    """Return what another gateway needs to take this answer over."""
    return Shadow(
        request_id=record.request_id,
        names=names,
        fingerprint=fingerprint,
        path=path,
        body=body,
        answer_id=reading.answer_id,
        created=reading.created,
        key=record.tenant,
        tenant=record.owner,
        prompts=tuple(pack_tokens(prompt) for prompt in reading.job.prompts),
        samplings=reading.job.samplings,
        choices=reading.job.n,
        heir_key=token_bytes(16),
        is_asked_for=is_asked_for,
        is_background=is_background,
        deadline_in_s=deadline.remaining_s(),
    )
