"""`topw_manifest.json`: what an exported folder is, and the proof that it is whole.

The manifest is written last, so a folder without a valid one is not a finished export and does not load. Reading it is
the first thing the runtime does with a folder, so this package needs nothing but the standard library.
"""

from topw_deploy.manifest.contents import (
    FORMAT_VERSION,
    KV_FORMS,
    MANIFEST_NAME,
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
    TensorSpec,
    Verification,
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
    "MOST_TOKENS",
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
    "TensorSpec",
    "Verification",
    "check_hashes",
    "describe_files",
    "load_decoder_manifest",
    "load_manifest",
    "manifest_from_json",
    "open_listed",
    "save_manifest",
    "sha256_of",
    "sha256_of_stream",
    "verification_from_dict",
]
