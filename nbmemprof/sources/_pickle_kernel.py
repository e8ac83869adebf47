"""The pickle decoder's kernel: data opcodes in, a tape of 64-bit values out. Nothing is ever called.

A value is one int64: three bits of tag, the rest payload (see the constants). Containers are nodes with
a run of values on the tape. A dict's key sequence is interned as a shape, strings and list runs are
interned by content, so that a trace event costs its values and a recurring stack costs nothing.
Interning is a saving, never relied on: after ``PROBES`` collisions a second copy is made.
Follows ``Lib/pickletools.py`` of CPython for the meaning of the opcodes.
"""

from __future__ import annotations

from typing import Any

# tags, and the special values
SPECIAL, INT, NUMBER, STRING, NODE, MARK = 0, 1, 2, 3, 4, 7  # NUMBER: payload is the offset of its opcode
ABSENT, NONE, FALSE, TRUE, OPAQUE = 0, 8, 16, 24, 32
# shapes of nodes that are not dicts (a dict has its shape's number, or EMPTY)
EMPTY, LIST, TUPLE, SET = -1, -2, -3, -4

# fields of the state
(POS, SP, MEMO, TAPE, NODES, RUNS, STRINGS, SHAPES, KEYS, LAST_MARK, PAUSE, RESULT, FAULT_OP) = range(13)
STATE_FIELDS = 13

# what the kernel returns; from TRUNCATED on the file is refused
(DONE, PAUSED, MORE_STACK, MORE_MEMO, MORE_TAPE, MORE_NODES, MORE_RUNS, MORE_STRINGS, MORE_SHAPES, MORE_KEYS) = range(10)
(TRUNCATED, UNSAFE, UNKNOWN, DAMAGED, TOO_DEEP, BAD_MEMO) = range(20, 26)

PROBES = 16  # written out below, as numba wants plain numbers
MAX_DEPTH = 64


def decode(
    data: Any, size: int, seed: int, stack: Any, memo: Any, tape: Any, node_shape: Any, node_run: Any, node_next: Any, node_tail: Any, node_depth: Any,
    run_start: Any, run_count: Any, run_depth: Any, run_hash: Any, string_start: Any, string_size: Any, string_hash: Any,
    shape_start: Any, shape_count: Any, shape_hash: Any, keys: Any, state: Any,
) -> int:  # fmt: skip
    """Decode from ``state[POS]`` on until the end, a pause, a lack of room or a fault; resumable except after a fault."""
    pos, sp, mark = state[0] + 0, state[1] + 0, state[9] + 0
    memo_count, tape_count, nodes, runs, strings, shapes, key_count = state[2] + 0, state[3] + 0, state[4] + 0, state[5] + 0, state[6] + 0, state[7] + 0, state[8] + 0
    pause = state[10] + 0
    code = -1
    budget = 0
    last_shape, last_run = -1, -1
    at = pos
    op = 0
    while True:
        at = pos
        if budget <= 0:
            if pos >= pause:
                code = 1
            elif sp + 4 > len(stack):
                code = 2
            elif memo_count + 2 > len(memo):
                code = 3
            elif nodes + 4 > len(node_shape):
                code = 5
            elif runs + 2 > len(run_start):
                code = 6
            elif strings + 2 > len(string_start):
                code = 7
            elif shapes + 2 > len(shape_start):
                code = 8
            if code >= 0:
                break
            budget = min(len(stack) - sp - 2, len(memo) - memo_count - 1, (len(node_shape) - nodes - 2) // 2, len(run_start) - runs - 1)
            budget = min(budget, len(string_start) - strings - 1, len(shape_start) - shapes - 1, 262144)
        budget -= 1
        if pos >= size:
            code = 20
            break
        op = data[pos] + 0
        pos += 1
        value = 0  # what this opcode pushes; 0: nothing
        make = 0  # 1: list or tuple items, 2: dict items, from `base` on, into node `target`
        base, target, count = 0, 0, 0

        # ---------------------------------------------------------------- memo reads and strings, the most frequent
        if op == 0x68 or op == 0x6A:  # BINGET LONG_BINGET
            if op == 0x68:
                if pos + 1 > size:
                    code = 20
                    break
                index = data[pos] + 0
                pos += 1
            else:
                if pos + 4 > size:
                    code = 20
                    break
                index = (data[pos] + 0) + (data[pos + 1] + 0) * 256 + (data[pos + 2] + 0) * 65536 + (data[pos + 3] + 0) * 16777216
                pos += 4
            if index >= len(memo) or memo[index] == 0:
                code = 25
                break
            value = memo[index] + 0
        elif op == 0x94 or op == 0x71 or op == 0x72:  # MEMOIZE BINPUT LONG_BINPUT
            if sp - mark - 1 < 1:
                code = 23
                break
            index = memo_count
            if op == 0x71:
                if pos + 1 > size:
                    code = 20
                    break
                index = data[pos] + 0
                pos += 1
            elif op == 0x72:
                if pos + 4 > size:
                    code = 20
                    break
                index = (data[pos] + 0) + (data[pos + 1] + 0) * 256 + (data[pos + 2] + 0) * 65536 + (data[pos + 3] + 0) * 16777216
                pos += 4
            if index > pos:  # an index beyond the bytes read is only there to make the reader allocate
                code = 25
                break
            if index >= len(memo):
                state[12] = index
                code = 3
                break
            if memo[index] == 0:
                memo_count += 1
            memo[index] = stack[sp - 1]
        elif op == 0x8A or op == 0x8B:  # LONG1 LONG4
            if pos + (1 if op == 0x8A else 4) > size:
                code = 20
                break
            length = data[pos] + 0
            pos += 1
            if op == 0x8B:
                length = length + (data[pos] + 0) * 256 + (data[pos + 1] + 0) * 65536 + (data[pos + 2] + 0) * 16777216
                pos += 3
            if length > size - pos:
                code = 20
                break
            if length > 8:
                value = at * 8 + 2
            else:
                number = 0
                i = pos + length - 1
                if length > 0:
                    number = data[i] + 0
                    if number >= 128:
                        number -= 256
                    i -= 1
                    while i >= pos:
                        number = number * 256 + (data[i] + 0)
                        i -= 1
                value = number * 8 + 1 if -1152921504606846976 <= number < 1152921504606846976 else at * 8 + 2
            pos += length
        elif op == 0x4A:  # BININT
            if pos + 4 > size:
                code = 20
                break
            number = (data[pos] + 0) + (data[pos + 1] + 0) * 256 + (data[pos + 2] + 0) * 65536 + (data[pos + 3] + 0) * 16777216
            if number >= 2147483648:
                number -= 4294967296
            value = number * 8 + 1
            pos += 4
        elif op == 0x4B:  # BININT1
            if pos + 1 > size:
                code = 20
                break
            value = (data[pos] + 0) * 8 + 1
            pos += 1
        elif op == 0x4D:  # BININT2
            if pos + 2 > size:
                code = 20
                break
            value = ((data[pos] + 0) + (data[pos + 1] + 0) * 256) * 8 + 1
            pos += 2
        elif op == 0x28:  # MARK
            stack[sp] = mark * 8 + 7
            mark = sp
            sp += 1
        # ---------------------------------------------------------------- containers
        elif op == 0x7D or op == 0x5D or op == 0x29 or op == 0x8F:  # EMPTY_DICT EMPTY_LIST EMPTY_TUPLE EMPTY_SET
            node_shape[nodes] = -1 if op == 0x7D else -2 if op == 0x5D else -3 if op == 0x29 else -4
            node_run[nodes] = -1
            node_next[nodes] = -1
            node_tail[nodes] = nodes
            node_depth[nodes] = 1
            value = nodes * 8 + 4
            nodes += 1
        elif op == 0x65 or op == 0x75 or op == 0x90:  # APPENDS SETITEMS ADDITEMS
            if mark < 1:
                code = 23
                break
            base, count = mark + 1, sp - mark - 1
            make = 2 if op == 0x75 else 1
        elif op == 0x61 or op == 0x73:  # APPEND SETITEM
            count = 1 if op == 0x61 else 2
            if sp - mark - 1 < count + 1:
                code = 23
                break
            base = sp - count
            make = 2 if op == 0x73 else 1
        elif op == 0x85 or op == 0x86 or op == 0x87:  # TUPLE1 TUPLE2 TUPLE3
            count = op - 0x84
            if sp - mark - 1 < count:
                code = 23
                break
            base = sp - count
            make = 3
        elif op == 0x74 or op == 0x6C or op == 0x64 or op == 0x91:  # TUPLE LIST DICT FROZENSET
            if mark < 0:
                code = 23
                break
            base, count = mark + 1, sp - mark - 1
            make = 4 if op == 0x64 else 3
        # ---------------------------------------------------------------- text and bytes
        elif op == 0x8C or op == 0x58 or op == 0x8D or op == 0x55 or op == 0x54:  # (SHORT_)BINUNICODE(8) (SHORT_)BINSTRING
            width = 1 if op == 0x8C or op == 0x55 else 8 if op == 0x8D else 4
            if pos + width > size:
                code = 20
                break
            length = 0
            i = width - 1
            while i >= 0:
                if length > size:  # before it could overflow
                    break
                length = length * 256 + (data[pos + i] + 0)
                i -= 1
            pos += width
            if length > size - pos:
                code = 20
                break
            slot = -1
            found = -1
            if length <= 1024:
                h = (seed + length) & 0xFFFFFFFF
                for i in range(pos, pos + length):
                    h = ((h ^ (data[i] + 0)) * 0x5BD1E995)
                    h = (h ^ (h >> 32)) & 0xFFFFFFFF
                h = (h ^ (h >> 15)) & (len(string_hash) - 1)
                for _probe in range(16):
                    entry = string_hash[h] + 0
                    if entry == 0:
                        slot = h
                        break
                    other = string_start[entry - 1] + 0
                    if string_size[entry - 1] == length:
                        i = 0
                        while i < length and data[other + i] == data[pos + i]:
                            i += 1
                        if i == length:
                            found = entry - 1
                            break
                    h = (h + 1) & (len(string_hash) - 1)
            if found < 0:
                found = strings
                string_start[found] = pos
                string_size[found] = length
                strings += 1
                if slot >= 0:
                    string_hash[slot] = found + 1
            value = found * 8 + 3
            pos += length
        elif op == 0x43 or op == 0x42 or op == 0x8E or op == 0x96:  # SHORT_BINBYTES BINBYTES BINBYTES8 BYTEARRAY8
            width = 1 if op == 0x43 else 4 if op == 0x42 else 8
            if pos + width > size:
                code = 20
                break
            length = 0
            i = width - 1
            while i >= 0:
                if length > size:
                    break
                length = length * 256 + (data[pos + i] + 0)
                i -= 1
            pos += width
            if length > size - pos:
                code = 20
                break
            pos += length
            value = 32
        # ---------------------------------------------------------------- the rest
        elif op == 0x4E:  # NONE
            value = 8
        elif op == 0x88:  # NEWTRUE
            value = 24
        elif op == 0x89:  # NEWFALSE
            value = 16
        elif op == 0x47:  # BINFLOAT
            if pos + 8 > size:
                code = 20
                break
            value = at * 8 + 2
            pos += 8
        elif op == 0x95:  # FRAME
            if pos + 8 > size:
                code = 20
                break
            length = 0
            i = 7
            while i >= 0:
                if length > size:
                    break
                length = length * 256 + (data[pos + i] + 0)
                i -= 1
            pos += 8
            if length > size - pos:
                code = 20
                break
        elif op == 0x80:  # PROTO
            if pos + 1 > size:
                code = 20
                break
            if data[pos] > 5:
                code = 22
                break
            pos += 1
        elif op == 0x2E:  # STOP
            if sp != 1 or mark >= 0:
                code = 23
                break
            state[11] = stack[0]
            code = 0
            break
        elif op == 0x30:  # POP
            if sp < 1:
                code = 23
                break
            sp -= 1
            if sp == mark:
                mark = stack[sp] >> 3
        elif op == 0x31:  # POP_MARK
            if mark < 0:
                code = 23
                break
            sp = mark
            mark = stack[sp] >> 3
        elif op == 0x32:  # DUP
            if sp - mark - 1 < 1:
                code = 23
                break
            value = stack[sp - 1] + 0
        elif (
            op == 0x63 or op == 0x93 or op == 0x69 or op == 0x6F or op == 0x81 or op == 0x92 or op == 0x52 or op == 0x62
            or op == 0x82 or op == 0x83 or op == 0x84 or op == 0x50 or op == 0x51 or op == 0x97 or op == 0x98
        ):  # fmt: skip
            code = 21
            break
        elif op == 0x49 or op == 0x4C or op == 0x46 or op == 0x53 or op == 0x56 or op == 0x67 or op == 0x70:  # protocol 0, a line of text each
            end = pos
            while end < size and data[end] != 10:
                end += 1
            if end >= size:
                code = 20
                break
            if op == 0x53 or op == 0x56:  # STRING UNICODE: still with their escapes, which a negative size says
                if end - pos > 1073741824:
                    code = 23
                    break
                string_start[strings] = pos
                string_size[strings] = pos - end
                value = strings * 8 + 3
                strings += 1
            elif op == 0x67 or op == 0x70:  # GET PUT
                index = 0
                if end == pos or end - pos > 12:
                    code = 25
                    break
                i = pos
                while i < end:
                    digit = (data[i] + 0) - 48
                    if digit < 0 or digit > 9:
                        code = 25
                    index = index * 10 + digit
                    i += 1
                if code >= 0:
                    break
                if op == 0x67:
                    if index >= len(memo) or memo[index] == 0:
                        code = 25
                        break
                    value = memo[index] + 0
                else:
                    if sp - mark - 1 < 1:
                        code = 23
                        break
                    if index > pos:
                        code = 25
                        break
                    if index >= len(memo):
                        state[12] = index
                        code = 3
                        break
                    if memo[index] == 0:
                        memo_count += 1
                    memo[index] = stack[sp - 1]
            else:  # INT LONG FLOAT
                value = at * 8 + 2
            pos = end + 1
        else:
            code = 22
            break

        # ---------------------------------------------------------------- fill a container with stack[base:base + count]
        if make > 0:
            is_dict = make == 2 or make == 4
            if is_dict and count % 2 == 1:
                code = 23
                break
            if tape_count + count > len(tape):
                code = 4
                break
            if is_dict and key_count + count > len(keys):
                code = 9
                break
            if make <= 2:
                target = stack[base - 2 if op == 0x65 or op == 0x75 or op == 0x90 else base - 1] + 0
                if (target & 7) != 4:
                    code = 23
                    break
                target = target >> 3
                kind = node_shape[target] + 0
                if (is_dict and kind < -1) or (not is_dict and kind != (-4 if op == 0x90 else -2)):
                    code = 23
                    break
            else:
                target = nodes
                node_shape[nodes] = -1 if make == 4 else -2 if op == 0x6C else -4 if op == 0x91 else -3
                node_run[nodes] = -1
                node_next[nodes] = -1
                node_tail[nodes] = nodes
                node_depth[nodes] = 1
                nodes += 1
            if count > 0:
                run, shape = -1, -1
                step, first = 1, base
                if is_dict:
                    step, first = 2, base + 1
                    pairs = count // 2
                    # the keys: the last shape again, or one met before, or a new one
                    if last_shape >= 0 and shape_count[last_shape] == pairs:
                        start = shape_start[last_shape] + 0
                        i = 0
                        while i < pairs and keys[start + i] == stack[base + 2 * i]:
                            i += 1
                        if i == pairs:
                            shape = last_shape
                    if shape < 0:
                        h = (seed + pairs) & 0xFFFFFFFF
                        for i in range(pairs):
                            v = stack[base + 2 * i] + 0
                            h = ((h ^ ((v ^ (v >> 29)) & 0xFFFFFFFF)) * 0x5BD1E995)
                            h = (h ^ (h >> 32)) & 0xFFFFFFFF
                        h = (h ^ (h >> 15)) & (len(shape_hash) - 1)
                        slot = -1
                        for _probe in range(16):
                            entry = shape_hash[h] + 0
                            if entry == 0:
                                slot = h
                                break
                            if shape_count[entry - 1] == pairs:
                                start = shape_start[entry - 1] + 0
                                i = 0
                                while i < pairs and keys[start + i] == stack[base + 2 * i]:
                                    i += 1
                                if i == pairs:
                                    shape = entry - 1
                                    break
                            h = (h + 1) & (len(shape_hash) - 1)
                        if shape < 0:
                            shape = shapes
                            shape_start[shape] = key_count
                            shape_count[shape] = pairs
                            for i in range(pairs):
                                keys[key_count + i] = stack[base + 2 * i]
                            key_count += pairs
                            shapes += 1
                            if slot >= 0:
                                shape_hash[slot] = shape + 1
                    last_shape = shape
                    count = pairs
                # the values: lists and small dicts are interned, an event's values are not
                slot = -1
                if (not is_dict and count <= 1024) or count <= 4:
                    if last_run >= 0 and run_count[last_run] == count:
                        start = run_start[last_run] + 0
                        i = 0
                        while i < count and tape[start + i] == stack[first + step * i]:
                            i += 1
                        if i == count:
                            run = last_run
                    if run < 0:
                        h = (seed + count) & 0xFFFFFFFF
                        for i in range(count):
                            v = stack[first + step * i] + 0
                            h = ((h ^ ((v ^ (v >> 29)) & 0xFFFFFFFF)) * 0x5BD1E995)
                            h = (h ^ (h >> 32)) & 0xFFFFFFFF
                        h = (h ^ (h >> 15)) & (len(run_hash) - 1)
                        for _probe in range(16):
                            entry = run_hash[h] + 0
                            if entry == 0:
                                slot = h
                                break
                            if run_count[entry - 1] == count:
                                start = run_start[entry - 1] + 0
                                i = 0
                                while i < count and tape[start + i] == stack[first + step * i]:
                                    i += 1
                                if i == count:
                                    run = entry - 1
                                    break
                            h = (h + 1) & (len(run_hash) - 1)
                    if not is_dict and count > 1:
                        last_run = run if run >= 0 else runs
                if run < 0:
                    run = runs
                    run_start[run] = tape_count
                    run_count[run] = count
                    depth = 0
                    for i in range(count):
                        v = stack[first + step * i] + 0
                        tape[tape_count + i] = v
                        if (v & 7) == 4:
                            below = node_depth[v >> 3] + 0
                            if below > depth:
                                depth = below
                    run_depth[run] = depth
                    tape_count += count
                    runs += 1
                    if slot >= 0:
                        run_hash[slot] = run + 1
                depth = run_depth[run] + 1
                if depth > node_depth[target]:
                    node_depth[target] = depth
                    if depth > 64:
                        code = 24
                        break
                # into the node itself, or into a new link of its chain
                link = target
                if node_run[target] >= 0:
                    link = nodes
                    nodes += 1
                    node_next[node_tail[target]] = link
                    node_tail[target] = link
                    node_next[link] = -1
                    node_tail[link] = link
                    node_depth[link] = 1
                    node_shape[link] = node_shape[target]
                node_run[link] = run
                if is_dict:
                    node_shape[link] = shape
            if make <= 2:
                if op == 0x65 or op == 0x75 or op == 0x90:
                    sp = base - 1
                    mark = stack[sp] >> 3
                else:
                    sp = base
            else:
                if op == 0x74 or op == 0x6C or op == 0x64 or op == 0x91:
                    sp = base - 1
                    mark = stack[sp] >> 3
                else:
                    sp = base
                value = target * 8 + 4
        if value != 0:
            stack[sp] = value
            sp += 1

    state[0] = at
    if code != 3:
        state[12] = op
    state[1], state[9] = sp, mark
    state[2], state[3], state[4], state[5], state[6], state[7], state[8] = memo_count, tape_count, nodes, runs, strings, shapes, key_count
    return code
