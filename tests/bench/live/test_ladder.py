"""The variants of the ladder: each differs by its rung alone."""

from random import Random

from bench.live.ladder.workloads import BLOCK_TOKENS, VARIANTS, WORKLOADS


def test_each_variant_differs_from_what_it_is_compared_with_by_one_mechanism() -> None:
    by_name = {variant.name: variant for variant in VARIANTS}
    for variant in VARIANTS:
        if variant.name in ("all", "recompute_only"):
            continue
        base = by_name[variant.against].settings
        keys = set(base) | set(variant.settings)
        changed = {key for key in keys if base.get(key) != variant.settings.get(key)}
        assert len(changed) == (0 if variant.name == "again" else 1), (variant.name, changed)


def test_names_are_unique() -> None:
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)


def test_every_workload_measures_variants_that_there_are_with_what_they_are_compared_with() -> None:
    by_name = {variant.name: variant for variant in VARIANTS}
    for workload in WORKLOADS:
        assert set(workload.variants) <= by_name.keys()
        assert {by_name[name].against for name in workload.variants} <= set(workload.variants)
    covered = {name for workload in WORKLOADS for name in workload.variants}
    assert covered == by_name.keys(), "a rung that no workload measures"


def test_a_workload_is_more_than_the_device_holds_and_the_same_for_every_variant() -> None:
    for workload in WORKLOADS:
        drawn = workload.draw(Random(1), 8000)
        assert drawn == workload.draw(Random(1), 8000)
        blocks = sum(-(-(len(prompt) + limit) // BLOCK_TOKENS) for prompt, limit in drawn)
        assert blocks > workload.kv_blocks, workload.name
        assert all(100 <= token < 8000 for prompt, _ in drawn for token in prompt)


def test_prompts_of_the_skewed_workload_fit_on_one_worker() -> None:
    skewed = next(workload for workload in WORKLOADS if workload.name == "skewed")
    drawn = skewed.draw(Random(1), 8000)
    assert sum(-(-(len(prompt) + 1) // BLOCK_TOKENS) for prompt, _ in drawn) < skewed.kv_blocks
