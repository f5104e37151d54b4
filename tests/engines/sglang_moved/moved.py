"""TEST STAND-IN for a newer SGLang: a plug-in, loaded before eyas' own, that gives the function which eyas hooks another name."""


def load() -> None:
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor

    SchedulerBatchResultProcessor._collect_hidden_states = SchedulerBatchResultProcessor._append_prefill_hidden_states
    del SchedulerBatchResultProcessor._append_prefill_hidden_states
