from dataclasses import replace

import pytest

from eval.contexts import by_context
from tests.eval.recorded import in_turn, measurements, request


def accepting(accepted, prompt_tokens, completion_tokens):
    steps = len(accepted)
    found = request(0, "result", [steps])
    return replace(found, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, parts={"accepted": accepted})


def test_every_verify_step_is_in_the_bucket_of_what_was_known_when_its_drafts_were_made():
    # 250 tokens of prompt and the first of the reply: 251; then 254, 255, 259 known
    found = by_context({"result": [accepting([2, 0, 3, 1], 250, 1 + 3 + 1 + 4 + 2)]}, 100, 0)
    assert found.by_cycle
    assert [(group.name, group.verify_steps) for group in found.groups] == [("<256", {"result": 3}), ("256-511", {"result": 1})]
    assert [group.lengths["result"].value for group in found.groups] == pytest.approx([8 / 3, 2])


def test_the_cut_off_last_cycle_counts_with_what_it_emitted():
    found = by_context({"result": [accepting([0, 3], 10, 1 + 1 + 2)]}, 100, 0)  # the second had four tokens, two were cut
    assert found.groups[0].lengths["result"].value == pytest.approx(3 / 2)


def test_buckets_add_up_to_the_whole():
    rows = [in_turn(m) for m in measurements() if m.variant == "result"]
    found = by_context({"result": rows}, 100, 0)
    assert len(found.groups) > 2
    assert sum(group.verify_steps["result"] for group in found.groups) == sum(m.verify_ct for m in rows)
    tokens = sum(group.lengths["result"].value * group.verify_steps["result"] for group in found.groups)
    assert tokens == pytest.approx(sum(m.emitted for m in rows))


def test_whole_requests_go_where_the_middle_of_their_reply_lies():
    rows = [m for m in measurements() if m.variant == "result"]
    found = by_context({"result": rows}, 100, 0)
    assert not found.by_cycle
    counts = {group.name: group.prompts for group in found.groups}
    middles = [m.prompt_tokens + 31 for m in rows]
    assert counts == {
        "<256": sum(m < 256 for m in middles),
        "256-511": sum(256 <= m < 512 for m in middles),
        "512-1023": sum(m >= 512 for m in middles),
    }


def test_one_drafter_without_turns_puts_all_of_them_by_request():
    rows = [m for m in measurements(3) if m.variant == "result"]
    assert not by_context({"result": [in_turn(m) for m in rows], "starter": rows}, 100, 0).by_cycle


def test_no_drafter_has_no_buckets():
    assert by_context({}, 100, 0).groups == []
