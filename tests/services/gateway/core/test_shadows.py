"""Requests of other gateways that are kept: found by name, taken over once, never more than there is room A
model that keeps everything in a list says what should be there."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.shadows import RequestShadows, Shadowed, size_bytes
from shared.messages.sequence import Sampling, pack_tokens
from shared.messages.shadows import Shadow

KEEP_S = 10.0
A, B = ("gateway-0", 1), ("gateway-2", 7)


def shadow(number: int, names: tuple[int, ...] = (), body_bytes: int = 10) -> Shadow:
    return Shadow(
        request_id=f"req_{number}",
        names=tuple(bytes([name]) for name in names or (number,)),
        fingerprint=b"",
        path="/v1/completions",
        body=bytes(body_bytes),
        answer_id="x",
        created=0,
        key="k",
        prompts=(pack_tokens([1, 2]), pack_tokens([3])),
        samplings=(Sampling(seed=1, max_tokens=4), Sampling(seed=1, max_tokens=4)),
        choices=2,
        heir_key=b"secret",
    )


def test_its_sequences_are_called_as_the_gateway_calls_them() -> None:
    assert shadow(1).keys == [("req_1", 0), ("req_1", 1), ("req_1-1", 0), ("req_1-1", 1)]


def test_what_a_gateway_that_is_gone_had_not_completed_is_taken_once() -> None:
    shadows = RequestShadows(1_000_000, KEEP_S)
    for number in range(4):
        shadows.put(A if number < 3 else B, shadow(number), 0.0)
    shadows.end(A, "req_1", 1.0)
    shadows.end(B, "req_0", 1.0)  # not its own to end
    assert [known.shadow.request_id for known in shadows.on_gone(A)] == ["req_0", "req_2"]
    assert shadows.on_gone(A) == [] and shadows.find(b"\x00") is None
    ended = shadows.find(b"\x01")
    assert ended is not None and ended.is_orphan, "complete; computed again when somebody asks"
    assert shadows.find(b"\x03") is not None
    shadows.on_tick(1.0 + KEEP_S + 0.1)
    assert shadows.find(b"\x01") is None and len(shadows) == 1
    shadows.drop(A, "req_3")
    assert len(shadows) == 1, "nor to drop"
    shadows.drop(B, "req_3")
    assert len(shadows) == 0 and shadows.bytes == 0


Act = Callable[[RequestShadows], object]
ACTS = st.one_of(
    st.builds(
        lambda owner, number, names, size: (
            lambda them: them.put(owner, shadow(number, tuple(names), size), 0.0)
        ),
        st.sampled_from([A, B]),
        st.integers(0, 9),
        st.lists(st.integers(0, 9), min_size=1, max_size=2, unique=True),
        st.integers(0, 3000),
    ),
    st.builds(lambda owner: lambda them: them.on_gone(owner), st.sampled_from([A, B])),
    st.builds(
        lambda owner, n: lambda them: them.end(owner, f"req_{n}", 1.0),
        st.sampled_from([A, B]),
        st.integers(0, 9),
    ),
    st.builds(
        lambda owner, n: lambda them: them.drop(owner, f"req_{n}"), st.sampled_from([A, B]), st.integers(0, 9)
    ),
    st.builds(lambda n: lambda them: them.take(f"req_{n}"), st.integers(0, 9)),
    st.builds(lambda now_s: lambda them: them.on_tick(now_s), st.floats(0, 30)),
)


@given(acts=st.lists(ACTS, max_size=40))
def test_the_tables_agree_and_are_bounded(acts: list[Act]) -> None:
    shadows = RequestShadows(4 * (1024 + 2000), KEEP_S)
    for act in acts:
        act(shadows)
        shadows.check_integrity()


@given(sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=20))
def test_the_oldest_give_way(sizes: list[int]) -> None:
    most = 8000
    shadows = RequestShadows(most, KEEP_S)
    kept: list[Shadowed] = []
    for number, size in enumerate(sizes):
        one = shadow(number, body_bytes=size)
        shadows.put(A, one, 0.0)
        kept.append(Shadowed(A, one, 0.0))
        while sum(size_bytes(known.shadow) for known in kept) > most:
            kept.pop(0)
    assert shadows.on_gone(A) == kept
