"""Literal types that several resources share, without pydantic: the help of the command line shows them."""

from __future__ import annotations

from encodings.aliases import aliases
from typing import Literal

Detail = Literal["low", "medium", "high"]
DriftState = Literal["too_few", "ok", "watch", "drifted"]
Engine = Literal["onnxruntime", "openvino"]
ErasedKind = Literal["subject", "template", "gallery", "album", "moved"]
EventType = Literal[
    "decision",
    "enrollment",
    "stranger_first_seen",
    "stranger_seen_again",
    "threshold_moved",
    "drift",
    "job_finished",
]
FaceChoice = Literal["only", "largest"]
FacesChoice = Literal["all", "largest"]
HygieneKind = Literal["duplicate_subjects", "mislabeled_template", "lookalikes"]
IdentifyOutcome = Literal["identified", "uncertain", "unknown", "no_face", "rejected_quality", "rejected_liveness"]
IndexSetting = Literal["auto", "exact", "compact"]
JobState = Literal["queued", "running", "succeeded", "failed", "canceled"]
KeyState = Literal["active", "expired", "revoked", "altered"]
LivenessSetting = Literal["off", "required"]
NameEncoding = Literal[
    "utf_8",
    "gbk", "gb2312", "gb18030", "big5", "big5hkscs", "cp932", "shift_jis", "euc_jp", "cp949", "euc_kr",
    "cp866", "cp1251", "koi8_r", "koi8_u", "cp855",
    "cp437", "cp850", "cp852", "cp858", "cp1250", "cp1252", "latin_1", "iso8859_2", "iso8859_15", "mac_roman",
    "cp737", "cp1253", "cp857", "cp1254", "cp862", "cp1255", "cp720", "cp1256", "cp775", "cp1257", "cp1258", "cp874",
]  # fmt: skip
"""Encodings of names in archives, as Python names them. Other codecs may be slow on names made for it."""
Preset = Literal["strict", "standard", "relaxed"]
Precision = Literal["fp32", "bf16", "fp16", "int8"]
RiskWarning = Literal["photos_of_one_sitting", "people_unlike_calibration"]
Scope = Literal["identify", "read", "enroll", "vectors", "admin"]
Source = Literal["pack", "gallery", "both"]
TemplateKind = Literal["photo", "embedding"]
Verdict = Literal["live", "not_live", "not_judged"]
VerifyOutcome = Literal["same", "uncertain", "different", "no_face", "rejected_quality", "rejected_liveness"]


def to_name_encoding(value: object) -> object:
    """Return the NameEncoding that a name or alias such as Shift-JIS or windows-1251 means; others unchanged."""
    if not isinstance(value, str):
        return value
    name = value.lower().replace("-", "_")
    return aliases.get(name, name)
