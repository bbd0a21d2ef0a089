"""`topw_manifest.json`: what an exported folder is, and the proof that it is whole.

The manifest is written last, so a folder without a valid one was never finished and does not load. Reading it
is the first thing the runtime does with a folder, hence this module needs nothing but the standard library.
"""

from topw_deploy.manifest.contents import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    DecoderManifest,
    Manifest,
    SamplerManifest,
    manifest_from_json,
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
from topw_deploy.manifest.parse import MOST_TOKENS, verification_from_dict
from topw_deploy.manifest.parts import (
    KV_FORMS,
    STATUSES,
    TARGETS,
    Check,
    DecoderInfo,
    FileEntry,
    NotCompared,
    Note,
    SamplerInfo,
    TensorSpec,
    Verification,
)

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
