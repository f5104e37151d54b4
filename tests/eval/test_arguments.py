from eval.arguments import ArgumentDifference, compare_arguments, equalising_flags, public_info

SGLANG = {
    "max_running_requests": 48,
    "mem_fraction_static": 0.78,
    "chunked_prefill_size": 8192,
    "cuda_graph_config": {"decode": {"max_bs": 48, "backend": "full"}},
    "disable_overlap_schedule": True,
    "speculative_algorithm": "EAGLE3",
    "page_size": None,
}


def differing(base, other):
    compared = compare_arguments({"none": base, "result": other}, {})
    return [str(difference) for difference in compared.remaining], [difference.name for difference in compared.expected]


def test_arguments_of_speculation_itself_are_expected_to_differ():
    base = {"speculative_algorithm": None, "max_total_num_tokens": 900, "observability_config": {"per_request_spec_decode_metrics": "none"}}
    other = {
        "speculative_algorithm": "EAGLE3",
        "max_total_num_tokens": 800,
        "observability_config": {"per_request_spec_decode_metrics": "summary"},
    }
    remaining, expected = differing(base, other)
    assert remaining == []
    assert expected == ["max_total_num_tokens", "observability_config.per_request_spec_decode_metrics", "speculative_algorithm"]


def test_a_section_that_only_speculation_has_is_told_as_one():
    section = {"method": "eagle3", "draft_model_config": {"dtype": "float32", "model": "x"}}
    found = compare_arguments({"none": {"speculative_config": None}, "result": {"speculative_config": section}}, {})
    assert found.expected == [ArgumentDifference("speculative_config", "result", "3 values", None)]
    assert found.remaining == []


def test_addresses_of_a_process_are_no_difference():
    base, other = ({"model_config": {"overrides": f"<function f at 0x7f{digit}aa>"}} for digit in "12")
    assert differing(base, other) == ([], [])


def test_every_other_difference_is_named_with_both_values():
    base = {"max_running_requests": None, "cuda_graph_config": {"decode": {"max_bs": 256}}, "same": 1}
    other = {"max_running_requests": 48, "cuda_graph_config": {"decode": {"max_bs": 48}}, "same": 1}
    assert differing(base, other)[0] == [
        "cuda_graph_config.decode.max_bs: 48 (result), 256 (baseline)",
        "max_running_requests: 48 (result), null (baseline)",
    ]


def test_ports_processes_and_seeds_mean_nothing():
    base = {"port": 1, "nccl_port": 2, "pid": 3, "random_seed": 4, "host": "a", "startup_time": 5.0, "eyas": {"drafters": []}}
    other = {"port": 2, "nccl_port": 3, "pid": 4, "random_seed": 5, "host": "b", "startup_time": 6.0, "eyas": {"drafters": ["x"]}}
    assert differing(base, other) == ([], [])


def test_names_that_merely_contain_a_meaningless_one_are_compared():
    assert differing({"export_metrics": False}, {"export_metrics": True})[0] == ["export_metrics: true (result), false (baseline)"]


def test_a_flag_that_made_the_baseline_equal_is_no_difference_but_another_value_of_it_is():
    servers = {"none": {"cuda_graph_max_bs_decode": 48, "page_size": 1}, "result": {"cuda_graph_max_bs_decode": None, "page_size": 64}}
    found = compare_arguments(servers, {"cuda-graph-max-bs-decode": 48, "page-size": 64})
    assert [difference.name for difference in found.remaining] == ["page_size"]


def test_without_a_baseline_nothing_is_compared():
    assert compare_arguments({"result": SGLANG}, {}).compared == 0
    assert compare_arguments({}, {}).compared == 0


def test_all_speculating_servers_are_compared_with_the_baseline():
    found = compare_arguments({"none": {"tp_size": 8}, "starter": {"tp_size": 4}, "result": {"tp_size": 2}}, {}).remaining
    assert found == [ArgumentDifference("tp_size", "starter", 4, 8), ArgumentDifference("tp_size", "result", 2, 8)]


def test_the_baseline_gets_limits_of_size_and_keeps_its_features():
    assert equalising_flags("sglang", SGLANG, {}) == {
        "max-running-requests": 48,
        "mem-fraction-static": 0.78,
        "chunked-prefill-size": 8192,
        "cuda-graph-max-bs-decode": 48,
    }


def test_what_both_servers_are_given_anyway_is_equal_already():
    given = {"--max_running_requests": 8, "mem-fraction-static": 0.78}
    assert set(equalising_flags("sglang", SGLANG, given)) == {"chunked-prefill-size", "cuda-graph-max-bs-decode"}


def test_vllm_has_names_of_its_own():
    config = {"scheduler_config": {"max_num_seqs": 256, "max_num_batched_tokens": 2048}, "cache_config": {"gpu_memory_utilization": 0.9}}
    assert equalising_flags("vllm", {"max_running_requests": 256, **config}, {}) == {
        "max-num-seqs": 256,
        "max-num-batched-tokens": 2048,
        "gpu-memory-utilization": 0.9,
    }


def test_no_secret_and_no_running_counter_is_written_down():
    info = {
        "api_key": "secret",
        "dtype": "auto",
        "internal_states": [1],
        "avg_spec_accept_length": 2.9,
        "launch_command": "--api-key secret",
        "nested": {"hf_token": "secret", "tp": 8},
    }
    assert public_info(info) == {"dtype": "auto", "nested": {"tp": 8}}
