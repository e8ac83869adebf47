"""The native observers of :mod:`nbmemprof.sources._cpu_hook` in LLVM's language; addresses are filled in when they are compiled.

A thread's slot (64 bytes): 0 thread, 1 stack of bits (does this nested operator count?), 2 depth of those that
count, 3 serial of the outermost one, 4 allocations that Python was not told of, 5 operators seen.
An event (32 bytes): address, size, time, slot << 48 | serial; a size below 0 is a release, address 0 a refusal.
"""

__all__ = ["IR"]

IR = """
define internal i64 @slot_of(i64 %tid) {{
entry:
  %mixed = lshr i64 %tid, 8
  br label %look
look:
  %i = phi i64 [ 0, %entry ], [ %next, %other ]
  %at = add i64 %mixed, %i
  %index = and i64 %at, {slots_mask}
  %place = shl i64 %index, 6
  %address = add i64 %place, {slots}
  %slot = inttoptr i64 %address to ptr
  %owner = load atomic i64, ptr %slot monotonic, align 8
  %mine = icmp eq i64 %owner, %tid
  br i1 %mine, label %found, label %free
free:
  %empty = icmp eq i64 %owner, 0
  br i1 %empty, label %take, label %other
take:
  %pair = cmpxchg ptr %slot, i64 0, i64 %tid monotonic monotonic
  %won = extractvalue {{ i64, i1 }} %pair, 1
  br i1 %won, label %found, label %look_again
look_again:
  br label %other
other:
  %next = add i64 %i, 1
  %full = icmp ugt i64 %next, {slots_mask}
  br i1 %full, label %found, label %look
found:
  ret i64 %address
}}

define internal i64 @my_slot() {{
  %tid = call i64 inttoptr (i64 {pthread_self} to ptr)()
  %address = call i64 @slot_of(i64 %tid)
  ret i64 %address
}}

define internal i64 @field(i64 %slot, i64 %which) {{
  %off = shl i64 %which, 3
  %address = add i64 %slot, %off
  %p = inttoptr i64 %address to ptr
  %value = load i64, ptr %p
  ret i64 %value
}}

define internal void @set(i64 %slot, i64 %which, i64 %value) {{
  %off = shl i64 %which, 3
  %address = add i64 %slot, %off
  %p = inttoptr i64 %address to ptr
  store i64 %value, ptr %p
  ret void
}}

define internal void @put(i64 %addr, i64 %size, i64 %slot) {{
  %now = alloca [2 x i64]
  %ignored = call i32 inttoptr (i64 {clock} to ptr)(i32 1, ptr %now)
  %seconds = load i64, ptr %now
  %second = getelementptr [2 x i64], ptr %now, i64 0, i64 1
  %nanos = load i64, ptr %second
  %whole = mul i64 %seconds, 1000000000
  %time = add i64 %whole, %nanos
  %depth = call i64 @field(i64 %slot, i64 2)
  %inside = icmp ne i64 %depth, 0
  %current = call i64 @field(i64 %slot, i64 3)
  %serial = select i1 %inside, i64 %current, i64 0
  %base = sub i64 %slot, {slots}
  %high = shl i64 %base, 42
  %tag = or i64 %high, %serial
  %n = atomicrmw add ptr inttoptr (i64 {state} to ptr), i64 1 monotonic
  %wrapped = and i64 %n, {ring_mask}
  %place = shl i64 %wrapped, 5
  %address = add i64 %place, {ring}
  %e0 = inttoptr i64 %address to ptr
  %e1 = getelementptr i64, ptr %e0, i64 1
  %e2 = getelementptr i64, ptr %e0, i64 2
  %e3 = getelementptr i64, ptr %e0, i64 3
  store i64 %addr, ptr %e0
  store i64 %size, ptr %e1
  store i64 %time, ptr %e2
  store i64 %tag, ptr %e3
  ret void
}}

define i32 @memalign(ptr %out, i64 %align, i64 %size) {{
  %result = call i32 inttoptr (i64 {posix_memalign} to ptr)(ptr %out, i64 %align, i64 %size)
  %good = icmp eq i32 %result, 0
  br i1 %good, label %given, label %note
given:
  %place = load i64, ptr %out
  br label %note
note:
  %addr = phi i64 [ 0, %0 ], [ %place, %given ]
  %slot = call i64 @my_slot()
  %before = call i64 @field(i64 %slot, i64 4)
  %after = add i64 %before, 1
  call void @set(i64 %slot, i64 4, i64 %after)
  call void @put(i64 %addr, i64 %size, i64 %slot)
  ret i32 %result
}}

define void @release(ptr %p) {{
  %addr = ptrtoint ptr %p to i64
  %none = icmp eq i64 %addr, 0
  br i1 %none, label %done, label %note
note:
  %given = call i64 inttoptr (i64 {malloc_usable_size} to ptr)(ptr %p)
  %slot = call i64 @my_slot()
  %less = sub i64 -1, %given
  call void @put(i64 %addr, i64 %less, i64 %slot)
  br label %done
done:
  call void inttoptr (i64 {free} to ptr)(ptr %p)
  ret void
}}

; 1 for an operator with a kernel of its own: "space::name", not autograd's, not composite
define internal i64 @counts(ptr %name) {{
entry:
  br label %step
step:
  %i = phi i64 [ 0, %entry ], [ %next, %more ]
  %hash = phi i64 [ {fnv}, %entry ], [ %hashed, %more ]
  %colons = phi i64 [ 0, %entry ], [ %seen, %more ]
  %p = getelementptr i8, ptr %name, i64 %i
  %c = load i8, ptr %p
  %end = icmp eq i8 %c, 0
  br i1 %end, label %judge, label %more
more:
  %wide = zext i8 %c to i64
  %mixed = xor i64 %hash, %wide
  %hashed = mul i64 %mixed, {prime}
  %colon = icmp eq i8 %c, 58
  %one = zext i1 %colon to i64
  %seen = add i64 %colons, %one
  %next = add i64 %i, 1
  br label %step
judge:
  %named = icmp eq i64 %colons, 2
  br i1 %named, label %search, label %no
search:
  %j = phi i64 [ 0, %judge ], [ %j1, %another ]
  %from = add i64 %hash, %j
  %index = and i64 %from, {names_mask}
  %off = shl i64 %index, 3
  %address = add i64 %off, {names}
  %entryp = inttoptr i64 %address to ptr
  %known = load i64, ptr %entryp
  %same = icmp eq i64 %known, %hash
  br i1 %same, label %no, label %maybe
maybe:
  %empty = icmp eq i64 %known, 0
  br i1 %empty, label %yes, label %another
another:
  %j1 = add i64 %j, 1
  br label %search
yes:
  ret i64 1
no:
  ret i64 0
}}

define void @begin(ptr sret(i64) %context, ptr %function) {{
  store i64 0, ptr %context
  %name = call ptr inttoptr (i64 {record_name} to ptr)(ptr %function)
  %counted = call i64 @counts(ptr %name)
  %slot = call i64 @my_slot()
  %bits = call i64 @field(i64 %slot, i64 1)
  %shifted = shl i64 %bits, 1
  %pushed = or i64 %shifted, %counted
  call void @set(i64 %slot, i64 1, i64 %pushed)
  %ops = call i64 @field(i64 %slot, i64 5)
  %ops1 = add i64 %ops, 1
  call void @set(i64 %slot, i64 5, i64 %ops1)
  %counts = icmp ne i64 %counted, 0
  br i1 %counts, label %deeper, label %done
deeper:
  %depth = call i64 @field(i64 %slot, i64 2)
  %depth1 = add i64 %depth, 1
  call void @set(i64 %slot, i64 2, i64 %depth1)
  %first = icmp eq i64 %depth, 0
  br i1 %first, label %fresh, label %done
fresh:
  %serial = call i64 @field(i64 %slot, i64 3)
  %serial1 = add i64 %serial, 1
  call void @set(i64 %slot, i64 3, i64 %serial1)
  br label %done
done:
  ret void
}}

define void @finish(ptr %function, ptr %context) {{
  %type = alloca ptr
  %value = alloca ptr
  %trace = alloca ptr
  %slot = call i64 @my_slot()
  %bits = call i64 @field(i64 %slot, i64 1)
  %popped = lshr i64 %bits, 1
  call void @set(i64 %slot, i64 1, i64 %popped)
  %counted = and i64 %bits, 1
  %counts = icmp ne i64 %counted, 0
  br i1 %counts, label %rise, label %done
rise:
  %depth = call i64 @field(i64 %slot, i64 2)
  %depth1 = sub i64 %depth, 1
  call void @set(i64 %slot, i64 2, i64 %depth1)
  %last = icmp eq i64 %depth1, 0
  br i1 %last, label %outer, label %done
outer:
  %allocs = call i64 @field(i64 %slot, i64 4)
  %some = icmp ne i64 %allocs, 0
  br i1 %some, label %python, label %done
python:
  call void @set(i64 %slot, i64 4, i64 0)
  %thread = call ptr inttoptr (i64 {PyGILState_GetThisThreadState} to ptr)()
  %known = icmp ne ptr %thread, null
  br i1 %known, label %tell, label %done
tell:
  %name = call ptr inttoptr (i64 {record_name} to ptr)(ptr %function)
  %base = sub i64 %slot, {slots}
  %index = lshr i64 %base, 6
  %serial = call i64 @field(i64 %slot, i64 3)
  %gil = call i32 inttoptr (i64 {PyGILState_Ensure} to ptr)()
  call void inttoptr (i64 {PyErr_Fetch} to ptr)(ptr %type, ptr %value, ptr %trace)
  call void inttoptr (i64 {tell} to ptr)(ptr %name, i64 %index, i64 %serial)
  %t = load ptr, ptr %type
  %v = load ptr, ptr %value
  %b = load ptr, ptr %trace
  call void inttoptr (i64 {PyErr_Restore} to ptr)(ptr %t, ptr %v, ptr %b)
  call void inttoptr (i64 {PyGILState_Release} to ptr)(i32 %gil)
  br label %done
done:
  ret void
}}
"""
