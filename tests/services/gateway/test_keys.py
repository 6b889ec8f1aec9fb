"""Keys with a name, class and weight: what is not known stops the start, which says what there is."""

import hashlib
import json

import pytest

from services.gateway.config import GatewayConfig
from shared.config import load
from shared.errors import ConfigError
from shared.messages.sequence import ServiceClass, Tenant
from tests.services.gateway.conftest import KEY, MakeStack

DIGEST = hashlib.sha256(b"sk-a").hexdigest()
MINE = hashlib.sha256(KEY.encode()).hexdigest()


def loaded(keys: object) -> GatewayConfig:
    return load(GatewayConfig, "gateway", [f"--keys={json.dumps(keys)}"], {})


def test_a_key_has_a_class_and_a_weight_or_the_usual_ones() -> None:
    tenants = loaded({"team-a": {"sha256": DIGEST, "class": "guaranteed", "weight": 2}}).tenants()
    assert tenants == {DIGEST: Tenant(name="team-a", service_class=ServiceClass.GUARANTEED, weight=2.0)}
    assert loaded({"b": {"sha256": DIGEST}}).tenants()[DIGEST] == Tenant(name="b")


@pytest.mark.parametrize(
    ("options", "listed"),
    [
        ({"sha256": DIGEST, "class": "gold"}, "guaranteed, standard, sheddable"),
        ({"sha256": DIGEST, "quota": 5}, "class, sha256, weight"),
        ({"sha256": DIGEST, "weight": 0}, "0.01"),
        ({"sha256": "abc"}, "sha256"),
        ({}, "sha256"),
    ],
)
def test_what_is_not_known_stops_the_start_and_lists_what_is(options: object, listed: str) -> None:
    with pytest.raises(ConfigError, match=listed):
        loaded({"a": options})


def test_a_key_that_is_there_twice_is_refused() -> None:
    config = loaded({"a": {"sha256": DIGEST}, "b": {"sha256": DIGEST}})
    with pytest.raises(ConfigError, match="twice"):
        config.check()


async def test_requests_carry_whose_they_are(make_stack: MakeStack) -> None:
    keys = {"team-a": {"sha256": MINE, "class": "sheddable"}}
    stack = await make_stack(api_key_sha256=(), keys=keys)
    assert (await stack.chat()).status_code == 200
    spec = stack.scheduler.submits[0]
    assert spec.tenant == Tenant(name="team-a", service_class=ServiceClass.SHEDDABLE)


async def test_a_key_without_a_name_is_told_apart_by_its_digest(make_stack: MakeStack) -> None:
    stack = await make_stack()
    assert (await stack.chat()).status_code == 200
    assert stack.scheduler.submits[0].tenant == Tenant(name=f"key-{MINE[:8]}")
