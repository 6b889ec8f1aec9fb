"""The table of fields is what the code says."""

from pathlib import Path

from services.gateway.openai.fields import DESCRIPTIONS, IGNORED, REFUSED, REQUESTS, table

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_table_is_the_codes() -> None:
    again = "write it again: python -m services.gateway.openai.fields > docs/fields.md"
    assert (DOCS / "fields.md").read_text() == table(), again


def test_every_field_is_described_once() -> None:
    honoured = {name for each in REQUESTS for name in each.model_fields}
    assert set(DESCRIPTIONS) == honoured
    assert not IGNORED & (honoured | set(REFUSED))
