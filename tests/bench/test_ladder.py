"""The variants of the ladder: each differs by its rung alone."""

from bench.ladder.variants import VARIANTS


def test_each_variant_differs_from_what_it_is_compared_with_by_one_mechanism() -> None:
    by_name = {variant.name: variant for variant in VARIANTS}
    for variant in VARIANTS:
        if variant.name in ("all", "recompute_only"):
            continue
        base = by_name[variant.against].settings
        keys = set(base) | set(variant.settings)
        changed = {key for key in keys if base.get(key) != variant.settings.get(key)}
        assert len(changed) == 1, (variant.name, changed)


def test_names_are_unique() -> None:
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)
