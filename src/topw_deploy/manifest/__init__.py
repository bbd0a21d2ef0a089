"""`topw_manifest.json`: the description of an export and the hashes of its files.

The manifest is written last: a folder without a valid one is unfinished and does not load. The runtime reads it before
anything else, so this package imports nothing that needs onnxruntime.
"""

from topw_deploy.manifest.contents import (
    FORMAT_VERSION,
    KV_FORMS,
    MANIFEST_NAME,
    MODEL_NAME,
    STATE_KINDS,
    STATUSES,
    TARGETS,
    Check,
    DecoderInfo,
    DecoderManifest,
    FileEntry,
    Manifest,
    NotCompared,
    Note,
    SamplerInfo,
    SamplerManifest,
    State,
    TensorSpec,
    Verification,
    key_value_states,
)
from topw_deploy.manifest.folder import (
    check_hashes,
    describe_files,
    load_decoder_manifest,
    load_manifest,
    open_listed,
    save_manifest,
    sha256_of,
    sha256_of_stream,
)
from topw_deploy.manifest.parse import MOST_TOKENS, manifest_from_json, verification_from_dict

__all__ = [
    "FORMAT_VERSION",
    "KV_FORMS",
    "MANIFEST_NAME",
    "MODEL_NAME",
    "MOST_TOKENS",
    "STATE_KINDS",
    "STATUSES",
    "TARGETS",
    "Check",
    "DecoderInfo",
    "DecoderManifest",
    "FileEntry",
    "Manifest",
    "NotCompared",
    "Note",
    "SamplerInfo",
    "SamplerManifest",
    "State",
    "TensorSpec",
    "Verification",
    "check_hashes",
    "describe_files",
    "key_value_states",
    "load_decoder_manifest",
    "load_manifest",
    "manifest_from_json",
    "open_listed",
    "save_manifest",
    "sha256_of",
    "sha256_of_stream",
    "verification_from_dict",
]
