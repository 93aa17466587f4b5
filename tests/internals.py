"""Names that are not public, for tests: the only place to edit when code moves.

    from tests.internals import ShardReader, main

Each name is loaded when it is first used: torch, Energon and optional packages are imported only by tests that need
them. A name belongs here if the property cannot be tested with `energon_packed` or the command line.
"""

from importlib import import_module
from typing import Any

PLACES = {
    # cli: the command line without the cost of a process; texts as a terminal of any size and encoding shows them
    "cli": "cli.main:cli",
    "TerminalProgress": "cli.progress:TerminalProgress",
    "duration": "cli.progress:duration",
    "as_options": "cli.options:as_options",
    "SafeConsole": "cli.terminal:SafeConsole",
    "echo": "cli.terminal:echo",
    "echo_json": "cli.terminal:echo_json",
    "main": "cli.main:main",
    "result_table": "cli.display:result_table",
    # compiled: kernels without Numba
    "compiled": "compiled:compiled",
    # dataflow: parts that only a failing process, a full pipe or a damaged state would show
    "ratio": "loading.state:ratio",
    "torch_loader": "loading.dataflow.loader",
    "check_order": "loading.order_log:check_order",
    "redistribute": "loading.energon.states:redistribute",
    "EnergonSource": "loading.energon.source:EnergonSource",
    "from_plain": "loading.energon.states:from_plain",
    "to_plain": "loading.energon.states:to_plain",
    "check_trusted": "loading.trust:check_trusted",
    "end_workers": "loading.failures:end_workers",
    "lost_worker": "loading.failures:lost_worker",
    "watched": "loading.failures:watched",
    "WorkerResultQueue": "loading.energon.faults:WorkerResultQueue",
    "Step": "loading.dataflow.worker_stream:Step",
    "WorkerProgress": "loading.dataflow.transport:WorkerProgress",
    "TransportMessage": "loading.dataflow.transport:Message",
    "round_robin": "loading.dataflow.transport:round_robin",
    "messages": "loading.dataflow.transport:messages",
    "read_state": "loading.energon.states:read_state",
    "replay": "loading.replay:replay",
    # demo: the data and the tokenizer that tests pack
    "DemoDataset": "demo:DemoDataset",
    "write_dataset": "demo:write_dataset",
    "write_tokenizer": "demo:write_tokenizer",
    "CHATML_TEMPLATE": "demo.tokenizer:CHATML_TEMPLATE",
    # encoding: what decides tokens, one step at a time, against Transformers and Jinja; limits against hostile images
    "StoredTokens": "encoding:StoredTokens",
    "TESTED": "encoding.vision.processors:TESTED",
    "VisionInputs": "encoding.vision.positions:VisionInputs",
    "TokenizerParts": "encoding.pretrained:TokenizerParts",
    "TODAY": "encoding.template:TODAY",
    "ChatTemplate": "encoding.template:ChatTemplate",
    "Renderer": "encoding.rendering:Renderer",
    "IGNORE_INDEX": "encoding.sample:IGNORE_INDEX",
    "supervised_turns": "encoding.supervision:supervised_turns",
    "TextTokenizer": "encoding.tokenizer:TextTokenizer",
    "FastokensEngine": "encoding.engines:FastokensEngine",
    "proof_texts": "encoding.engines:proof_texts",
    "engines": "encoding.engines",
    "load_image": "encoding.vision.images:load_image",
    "load_vision": "encoding:load_vision",
    "read_header": "encoding.vision.images:read_header",
    "MAX_PIXELS": "encoding.vision.images:MAX_PIXELS",
    "images": "encoding.vision.images",
    "mrope_positions": "encoding.vision.positions:mrope_positions",
    "ProcessorVision": "encoding.vision.processors:ProcessorVision",
    "processor_vision": "encoding.vision.processors",
    "ContentGuard": "encoding.purity:ContentGuard",
    "content_guard": "encoding.purity:content_guard",
    "content_places": "encoding.turns:content_places",
    "Skeleton": "encoding.skeleton:Skeleton",
    "marker": "encoding.skeleton:marker",
    "ESCAPE_BASE": "encoding.special_text:ESCAPE_BASE",
    "SpecialText": "encoding.special_text:SpecialText",
    "control_tokens": "encoding.special_text:control_tokens",
    "searched_literals": "encoding.special_text:searched_literals",
    "EscapedTokenizer": "encoding.special_text:EscapedTokenizer",
    "OutOfTime": "encoding.template:OutOfTime",
    "time_limit": "encoding.template:time_limit",
    "template": "encoding.template",
    "tokenizer": "encoding.tokenizer",
    "EncoderSettings": "encoding:EncoderSettings",
    # errors: bases and messages of errors
    "EngineMismatch": "errors:EngineMismatch",
    # flavors: what Energon calls of a dataset
    "captioning_sample_loader": "flavors.packed_captioning:sample_loader",
    # files: untrusted text as messages show it
    "visible": "files:visible",
    # formats: each codec without a pipeline
    "codec_for": "formats:codec_for",
    "CODECS": "formats:CODECS",
    "codec_of": "formats:codec_of",
    "READ_ONLY": "formats:READ_ONLY",
    "TIMESTAMPS_ADDED": "formats.third_party:TIMESTAMPS_ADDED",
    "image_count": "formats.parts:image_count",
    # inspection: reports as values, in place of HTML and tables
    "extract_pack": "inspection.view:extract_pack",
    "PackedFolder": "inspection.folder:PackedFolder",
    "gather": "inspection.report_data:gather",
    "render_report": "inspection.report:render_report",
    "verify": "inspection.verify:verify",
    "even_bins": "inspection.report:even_bins",
    "integer_bins": "inspection.report:integer_bins",
    "log_integer_bins": "inspection.report:log_integer_bins",
    "token_rows": "inspection.tokens:token_rows",
    "KINDS": "inspection.tokens:KINDS",
    "map_pack": "inspection.tokens:map_pack",
    "compare": "inspection.lengths:compare",
    "histogram": "inspection.lengths:histogram",
    "percentiles": "inspection.lengths:percentiles",
    "recommend": "inspection.lengths:recommend",
    "_zoomed": "inspection.report:_zoomed",
    "view_pack": "inspection.view:view_pack",
    "_shape": "inspection.view:_shape",
    # integrations: stages of Megatron and Transformers that need a trainer, or many processes, to be reached
    "megatron_batch": "integrations.megatron:megatron_batch",
    "MegatronRanks": "integrations.megatron.ranks:MegatronRanks",
    "ranks": "integrations.megatron.ranks",
    "check_parallelism": "integrations.megatron.ranks:check_parallelism",
    "train_valid_test_dataloaders_provider": "integrations.megatron:train_valid_test_dataloaders_provider",
    "restore_iterator": "integrations.megatron.restore:restore_iterator",
    "state_file": "integrations.megatron.restore:state_file",
    "restore": "integrations.megatron.restore",
    "MegatronIterator": "integrations.megatron:MegatronIterator",
    "isolation_table": "integrations.isolation:isolation_table",
    "measure": "integrations.isolation:measure",
    "short_row": "integrations.isolation:short_row",
    "isolation": "integrations.isolation",
    "ordered_loader": "integrations.megatron.provider:ordered_loader",
    "ConsumedBatches": "integrations.trainer_state:ConsumedBatches",
    # options: declarations of options, for tables that must agree with them
    "declared": "options:declared",
    "make": "options:make",
    # packing: kernels and their limits; plans are checked through `pack_lengths`
    "balanced_steps": "packing.balance:balanced_steps",
    "imbalance": "packing.balance:imbalance",
    "bitset": "packing.kernels",
    "planner": "packing.planner",
    "kernels": "packing.kernels",
    "load_kernels": "packing:load_kernels",
    # pipeline: stages on their own, for faults and limits that a small run does not meet
    "FolderLock": "pipeline.workspace:FolderLock",
    "keys": "pipeline.run_state",
    "split_ranges": "pipeline.plan:split_ranges",
    "LengthsOptions": "pipeline.survey:LengthsOptions",
    "read_config": "pipeline.config_file:read_config",
    "chunks": "pipeline.chunks",
    "most_common": "pipeline.table:most_common",
    "count_strings": "pipeline.chunks:count_strings",
    "reader": "pipeline.reader",
    "dry_run": "pipeline:dry_run",
    "TokenCache": "pipeline.chunks:TokenCache",
    "TokenReader": "pipeline.chunks:TokenReader",
    "tokens_size": "pipeline.chunks:tokens_size",
    "write_tokens": "pipeline.chunks:write_tokens",
    "PackKeywords": "pipeline.options:PackKeywords",
    "parse_part": "pipeline.options:parse_part",
    "available_cores": "system:available_cores",
    "parse_seq_len": "pipeline.options:parse_seq_len",
    "parse_size": "pipeline.options:parse_size",
    "prefix_of": "pipeline.options:prefix_of",
    "LocalEngine": "pipeline.engine:LocalEngine",
    "compute_fingerprints": "pipeline.run_state:compute_fingerprints",
    "table": "pipeline.table",
    "measure_stage": "pipeline.measure",
    "index_stage": "pipeline.write",
    "engine": "pipeline.engine",
    "advice": "pipeline.rejects:advice",
    "main_reason": "pipeline.rejects:main_reason",
    # records: shapes and media on their own, for records that no run would accept
    "check_patch_positions": "encoding.vision.media:check_patch_positions",
    "media": "records.media",
    "normalize_module": "records.normalize",
    "RECORD_FORMATS": "records.record_formats:RECORD_FORMATS",
    "_has_long_number": "records.fields:_has_long_number",
    "parse_json": "records.fields:parse_json",
    "mapping": "records.mapping",
    "NO_PLACEHOLDER": "records.normalize:NO_PLACEHOLDER",
    "CALLS_IN_TEXT": "records.tools:CALLS_IN_TEXT",
    "TOOLS_IN_TEXT": "records.tools:TOOLS_IN_TEXT",
    # shards: files of a dataset, to read, damage and repair them
    "streams": "files",
    "make_nv_meta": "shards.repair:make_nv_meta",
    "scan_tar": "shards.scan:scan_tar",
    "ShardReader": "shards.reader:ShardReader",
    "TarShardWriter": "shards.tar:TarShardWriter",
    "atomic_path": "files:atomic_path",
    "packs_per_worker": "shards.steps:packs_per_worker",
    "ShardRows": "shards.tar:ShardRows",
    # sources: readers of files on their own, for damages and limits
    "open_sources": "sources:open_sources",
    "CsvSource": "sources.csv:CsvSource",
    "parquet_batches": "sources.arrow:parquet_batches",
    "JsonlSource": "sources:JsonlSource",
    "SOURCES": "sources.registry:SOURCES",
    "tar_index": "sources.webdataset",
    # version: of the files of a dataset
    "FORMAT_VERSION": "version:FORMAT_VERSION",
    # blends: what the command `metadataset` writes, from a function
    "make_blend": "blends:make_blend",
    "write_metadataset": "blends:write_metadataset",
    "render": "blends:render",
    # metadatasets: the reader itself, against Energon's
    "read_split": "metadatasets:read_split",
    "read_metadataset": "metadatasets:read_metadataset",
    # tarfiles: the reader itself, against Python's tarfile and GNU tar
    "TarError": "tarfiles:TarError",
    "open_tar": "tarfiles:open_tar",
    "read_content": "tarfiles:read_content",
}
"""Name for tests -> `module:name` below `energon_packed`, or `module` alone."""

PRELOADED = (
    "energon_packed.cli.main",
    "energon_packed.cli.pack",
    "energon_packed.cli.lengths",
    "energon_packed.cli.verify",
    "energon_packed.cli.metadataset",
    "energon_packed.cli.nv_meta",
    "energon_packed.pipeline.run",
    "energon_packed.encoding",
    "energon_packed.encoding.patch_kernel",
    "energon_packed.loading",
    "energon_packed.loading.energon.loader",
    "energon_packed.integrations.megatron",
)
"""Modules that `tests/preloaded.py` imports once for all processes, because their import is slow."""


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"tests.internals has no {name!r}; add its place to PLACES")
    module, _, attribute = PLACES[name].partition(":")
    found = import_module(f"energon_packed.{module}")
    return getattr(found, attribute) if attribute else found
