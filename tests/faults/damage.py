"""Damage to files: bytes that change, JSON with other values, other things in a file's place."""

import json
import os
import struct
import zlib

DEEP = "[" * 100_000
ODD = (None, True, False, -1, 0, -0.5, 1.5, 2**31, 2**63, -(2**70), 10**400, 1e308)
ODD += (float("nan"), float("inf"), "", "../../x", "/etc/passwd", "center.memory", "é" * 50)
ODD += ([], {}, [[]], {"a": 1}, [1, "2", None], ["x"] * 1000)


def damage(path, original, rng):
    """Put something else in a file's place; return in words what, and whether its checksum fits."""
    path.unlink()
    if rng.random() < 0.03:
        return _another_thing(path, original, rng), False
    data, words, fits = bytearray(original), [], False
    if rng.random() < 0.5:
        data, words, fits = _other_values(original, rng)
    if not words or (not fits and rng.random() < 0.1):
        data, more = rng.choice(BYTES)(bytearray(data), rng)
        words, fits = [*words, more], False
    path.write_bytes(data)
    path.chmod(0o600)
    return ", ".join(words), fits


def repair(path, original):
    """Put a file back."""
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.write_bytes(original)
    path.chmod(0o600)


def _another_thing(path, original, rng):
    what = rng.choice(["a link", "a link to nothing", "an endless link", "a directory", "a pipe"])
    copy = path.with_name("elsewhere")
    if what == "a directory":
        path.mkdir()
    elif what == "a pipe":
        os.mkfifo(path)
    elif what == "a link":
        copy.write_bytes(original)
        path.symlink_to(copy)
    else:
        path.symlink_to("/dev/zero" if what == "an endless link" else "/nowhere")
    return what


def _flip(data, rng):
    at = rng.randrange(8 * len(data))
    data[at // 8] ^= 1 << at % 8
    return data, f"bit {at}"


def _byte(data, rng):
    at = rng.randrange(len(data))
    data[at] = rng.choice([0, 0xFF, ord("-"), ord("9"), ord("e"), rng.randrange(256)])
    return data, f"byte {at}"


def _cut(data, rng):
    at = rng.choice([0, 1, 7, 8, len(data) - 1, rng.randrange(len(data))])
    return data[:at], f"cut at {at}"


def _insert(data, rng):
    at, new = rng.randrange(len(data) + 1), rng.randbytes(rng.choice([1, 8, 100]))
    return data[:at] + new + data[at:], f"{len(new)} bytes at {at}"


def _drop(data, rng):
    at, size = rng.randrange(len(data)), rng.choice([1, 8, 100])
    return data[:at] + data[at + size :], f"without {size} at {at}"


def _double(data, rng):
    at, size = rng.randrange(len(data)), rng.choice([1, 8, 100])
    return data[: at + size] + data[at:], f"{size} twice at {at}"


def _zeros(data, rng):
    at, size = rng.randrange(len(data)), rng.choice([8, 512])
    part = len(data[at : at + size])
    data[at : at + size] = bytes(part)
    return data, f"{part} zeros at {at}"


def _deep(data, rng):
    at = rng.randrange(len(data))
    return data[:at] + DEEP.encode() + data[at:], f"deep at {at}"


BYTES = [_flip] * 8 + [_byte] * 3 + [_cut, _insert, _drop, _double, _zeros, _deep]


def _other_values(original, rng):
    """Change values of JSON: of a file, of a line of one, of a safetensors file's header."""
    fits = rng.random() < 0.7
    if original[:1] == b"{":
        lines = original.split(b"\n")
        if not original.endswith(b"\n"):
            values = json.loads(original)
            words = [_change(values, rng)]
            values = seal(values) if fits else values
            return json.dumps(values, indent=1).encode(), words, fits
        k = rng.randrange(len(lines) - 1)
        values = json.loads(lines[k])
        words = [f"line {k}: {_change(values, rng)}"]
        lines[k] = json.dumps(values).encode()
        return b"\n".join(lines), words, True
    (size,) = struct.unpack("<Q", original[:8])
    header, data = json.loads(original[8 : 8 + size]), bytearray(original[8 + size :])
    metadata = header.get("__metadata__", {})
    inner = [key for key, text in metadata.items() if text.startswith("{")]
    kind = rng.random()
    if kind < 0.5 and inner:
        values = json.loads(metadata[inner[0]])
        words = _change(values, rng)
        metadata[inner[0]] = json.dumps(values)
    elif kind < 0.8 or len(data) < 4:
        words = _change(header, rng)
    else:
        at = 4 * rng.randrange(len(data) // 4)
        data[at : at + 4] = struct.pack("<f", rng.choice([float("nan"), float("-inf"), 1e30]))
        words = f"a number at {at}"
    if fits and isinstance(header.get("__metadata__"), dict):
        header["__metadata__"]["data"] = f"{zlib.crc32(data):08x}"
        header["__metadata__"] = seal(header["__metadata__"], header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data, [words], fits


def seal(values, whole=None):
    """Give values a checksum that fits, as `springline.sealed` computes it."""
    rest = {k: v for k, v in values.items() if k != "checksum"}
    sealed = rest if whole is None else {**whole, "__metadata__": rest}
    text = json.dumps(sealed, sort_keys=True, separators=(",", ":"))
    return rest | {"checksum": f"{zlib.crc32(text.encode()):08x}"}


def _change(values, rng):
    """Change one value somewhere in it."""
    node, path = values, []
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return f"nothing at {path}"
        key = rng.choice(keys)
        path.append(key)
        if not isinstance(node[key], dict | list) or not node[key] or rng.random() < 0.3:
            break
        node = node[key]
    how = rng.random()
    if how < 0.15:
        del node[key]
        return f"without {path}"
    if how < 0.25:
        other = rng.choice(keys)
        node[key], node[other] = node[other], node[key]
        return f"{path} and {other!r} swapped"
    if how < 0.35 and isinstance(node, list):
        node.append(node[key])
        return f"{path} twice"
    if how < 0.35:
        node[f"{key}x"] = node[key]
        return f"{path} also as {key}x"
    new = rng.choice(ODD)
    if isinstance(node[key], int | float) and rng.random() < 0.4:
        new = rng.choice([-node[key], node[key] + 1, node[key] * 2.5, str(node[key])])
    node[key] = new
    return f"{path} = {str(new)[:40]!r}"
