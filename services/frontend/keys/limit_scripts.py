"""The scripts that run in a Valkey or Redis server, each as a whole and by the server's clock.

A key of ours has a hash with its windows and its day, and a sorted set of its open requests with
the time until which each counts. Each request has a string: what it was charged with while it runs
(tokens, slot, day), and ``x`` for five minutes when it has ended. By it a call counts once, however
often and in whatever order it comes. A window is the sum of the last minute in slots of a quarter
of a second, with what is owed, as ``sliding_window`` has it. Fields of a window with the prefix P:
``Pt`` the sum, ``Ps`` the oldest slot that may be there, ``Pn`` the newest, ``P:SLOT`` an amount,
``Pd`` and ``Pa`` what is owed and from when on (ms) it wears off.
"""

from __future__ import annotations

SLOT_MS = 250
SLOTS = 240
LEASE_MS = 15_000
"""An open request counts for so long; its frontend renews it while it runs."""
DAYS_MS = 2 * 86_400_000
"""What nobody has used for so long is forgotten."""
ENDED_MS = 300_000
"""So long it is known that a request has ended."""

_WINDOW = f"""
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local slot = math.floor(now / {SLOT_MS})
local day = math.floor(time[1] / 86400)

local function used(hash, prefix, limit)
  local fields = {{prefix .. 't', prefix .. 's', prefix .. 'd', prefix .. 'a'}}
  local found = redis.call('HMGET', hash, unpack(fields))
  local total, oldest = tonumber(found[1]) or 0, tonumber(found[2]) or slot
  local first = slot - {SLOTS}
  if oldest < first then
    for old = oldest, math.min(first - 1, oldest + {SLOTS}) do
      local amount = redis.call('HGET', hash, prefix .. ':' .. old)
      if amount then
        total = total - amount
        redis.call('HDEL', hash, prefix .. ':' .. old)
      end
    end
    oldest = first
  end
  redis.call('HSET', hash, prefix .. 't', total, prefix .. 's', oldest)
  local owed = (tonumber(found[3]) or 0)
  if owed > 0 then
    local since = math.max(0, now - (tonumber(found[4]) or now))
    owed = math.max(0, owed - since * limit / {SLOT_MS * SLOTS})
  end
  return total, math.ceil(owed)
end

local function charge(hash, prefix, amount)
  redis.call('HINCRBY', hash, prefix .. ':' .. slot, amount)
  redis.call('HINCRBY', hash, prefix .. 't', amount)
  redis.call('HSET', hash, prefix .. 'n', slot)
end

local function free_in(hash, prefix, lacking, limit)
  local oldest = tonumber(redis.call('HGET', hash, prefix .. 's')) or slot
  local wait = 1
  for one = oldest, slot do
    local amount = tonumber(redis.call('HGET', hash, prefix .. ':' .. one)) or 0
    if amount > 0 then
      lacking = lacking - amount
      wait = math.max(1, (one + 1 + {SLOTS}) * {SLOT_MS} - now)
    end
    if lacking <= 0 then return wait end
  end
  local since = math.max(0, (tonumber(redis.call('HGET', hash, prefix .. 'a')) or now) - now)
  return math.max(wait, since + math.ceil(lacking * {SLOT_MS * SLOTS} / limit))
end

local function empty_in(hash, prefix, total, owed, limit)
  local newest = tonumber(redis.call('HGET', hash, prefix .. 'n')) or slot
  local after = 0
  if total > 0 then after = (newest + 1 + {SLOTS}) * {SLOT_MS} - now end
  local paid = 0
  if owed > 0 then
    paid = math.max(0, (tonumber(redis.call('HGET', hash, prefix .. 'a')) or now) - now)
      + math.ceil(owed * {SLOT_MS * SLOTS} / limit)
  end
  return math.max(after, paid)
end

-- What the data of one key can cause is a text in place of an answer; the rest fails the call.
local function guarded(one, item)
  local is_done, found = pcall(one, item)
  if is_done then return found end
  local text = type(found) == 'table' and found.err or tostring(found)
  for _, own in ipairs({{'WRONGTYPE', 'integer', 'overflow', 'arithmetic'}}) do
    if string.find(text, own, 1, true) then return text end
  end
  error(found)
end

local function each(one, count)
  local answers = {{}}
  for item = 1, count do answers[item] = guarded(one, item) end
  return answers
end
"""

ADMIT = (
    _WINDOW
    + f"""
local function admit(item)
  local hash, open, request = KEYS[3 * item - 2], KEYS[3 * item - 1], KEYS[3 * item]
  local at = (item - 1) * 6
  local tokens, member = tonumber(ARGV[at + 1]), ARGV[at + 2]
  local rpm, tpm = tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4])
  local tpd, most = tonumber(ARGV[at + 5]), tonumber(ARGV[at + 6])
  local is_known = redis.call('EXISTS', request) == 1
  local refused, amount, wait = 0, 0, 0
  local requests, requests_owed, taken, owed = 0, 0, 0, 0
  if rpm > 0 then requests, requests_owed = used(hash, 'r', rpm) end
  if tpm > 0 then taken, owed = used(hash, 't', tpm) end
  local of_day = redis.call('HMGET', hash, 'day', 'dt')
  local today = 0
  if tonumber(of_day[1]) == day then today = tonumber(of_day[2]) or 0 end
  if is_known then
    refused = 0
  elseif rpm > 0 and requests + requests_owed + 1 > rpm then
    refused, amount = 1, requests
    wait = free_in(hash, 'r', requests + requests_owed + 1 - rpm, rpm)
  elseif tpm > 0 and taken + owed + tokens > tpm then
    refused, amount = 2, taken + owed
    wait = free_in(hash, 't', taken + owed + tokens - tpm, tpm)
  elseif tpd > 0 and today + tokens > tpd then
    refused, amount, wait = 3, today, (day + 1) * 86400000 - now
  elseif most > 0 then
    redis.call('ZREMRANGEBYSCORE', open, '-inf', now)
    amount = redis.call('ZCARD', open)
    if amount >= most then refused, wait = 4, 1000 end
  end
  if refused == 0 and not is_known then
    redis.call('SET', request, tokens .. ' ' .. slot .. ' ' .. day, 'PX', {DAYS_MS})
    if rpm > 0 then charge(hash, 'r', 1); requests = requests + 1 end
    if tpm > 0 then charge(hash, 't', tokens); taken = taken + tokens end
    if tpd > 0 then redis.call('HSET', hash, 'day', day, 'dt', today + tokens) end
    if most > 0 then
      redis.call('ZADD', open, now + {LEASE_MS}, member)
      redis.call('PEXPIRE', open, {DAYS_MS})
    end
    redis.call('PEXPIRE', hash, {DAYS_MS})
  end
  local requests_reset, tokens_reset = 0, 0
  if rpm > 0 then requests_reset = empty_in(hash, 'r', requests, requests_owed, rpm) end
  if tpm > 0 then tokens_reset = empty_in(hash, 't', taken, owed, tpm) end
  return {{refused, amount, wait, requests + requests_owed, requests_reset, taken + owed,
    tokens_reset}}
end
return each(admit, #KEYS / 3)
"""
)
"""KEYS: hash, set and string of each request. ARGV, six of each: its tokens, its name, and the four
limits, 0 where there is none. Gives seven whole numbers of each: which limit refuses (from 1; 0: it
is let in), what is used of it, after how many ms it may be let in; requests used, ms until none
are; the same of tokens. Or a text: why it could not be counted."""

SETTLE = (
    _WINDOW
    + f"""
local function settle(item)
  local hash, open, request = KEYS[3 * item - 2], KEYS[3 * item - 1], KEYS[3 * item]
  local at = (item - 1) * 6
  local member, requests, more = ARGV[at + 1], tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local rpm, tpm, tpd = tonumber(ARGV[at + 4]), tonumber(ARGV[at + 5]), tonumber(ARGV[at + 6])
  local charged = redis.call('GET', request)
  if charged == 'x' then return 0 end
  redis.call('SET', request, 'x', 'PX', {ENDED_MS})
  redis.call('ZREM', open, member)
  local then_slot, then_day = slot, day
  if charged then
    local tokens, at_slot, at_day = string.match(charged, '^(%d+) (%d+) (%d+)$')
    requests, more = requests - 1, more - tonumber(tokens)
    then_slot, then_day = at_slot, tonumber(at_day)
  end
  if rpm > 0 and requests > 0 then
    used(hash, 'r', rpm)
    charge(hash, 'r', requests)
  elseif rpm > 0 and requests < 0
      and redis.call('HEXISTS', hash, 'r:' .. then_slot) == 1 then
    redis.call('HINCRBY', hash, 'r:' .. then_slot, requests)
    redis.call('HINCRBY', hash, 'rt', requests)
  end
  if tpm > 0 and more < 0 and redis.call('HEXISTS', hash, 't:' .. then_slot) == 1 then
    redis.call('HINCRBY', hash, 't:' .. then_slot, more)
    redis.call('HINCRBY', hash, 'tt', more)
  elseif tpm > 0 and more > 0 then
    local taken, owed = used(hash, 't', tpm)
    local free = math.min(more, math.max(0, tpm - taken - owed))
    charge(hash, 't', free)
    if more > free then
      local from = now + {SLOT_MS * SLOTS}
      if owed > 0 then from = math.max(now, tonumber(redis.call('HGET', hash, 'ta')) or now) end
      redis.call('HSET', hash, 'td', owed + more - free, 'ta', from)
    end
  end
  if tpd > 0 and more ~= 0 and then_day == day then
    local today = 0
    if tonumber(redis.call('HGET', hash, 'day')) == day then
      today = tonumber(redis.call('HGET', hash, 'dt')) or 0
    end
    redis.call('HSET', hash, 'day', day, 'dt', math.max(0, today + more))
  end
  redis.call('PEXPIRE', hash, {DAYS_MS})
  return 0
end
return each(settle, #KEYS / 3)
"""
)
"""KEYS: hash, set and string of each request. ARGV, six of each: its name; 1 where it took place,
else 0; its tokens; the limits of requests, of tokens a minute and a day. Gives 0 of each, or a
text: why it could not be counted."""

RENEW = (
    _WINDOW
    + f"""
local function renew(item)
  local open, request = KEYS[2 * item - 1], KEYS[2 * item]
  if redis.call('GET', request) ~= 'x' then
    redis.call('ZADD', open, now + {LEASE_MS}, ARGV[item])
    redis.call('PEXPIRE', open, {DAYS_MS})
  end
  return 0
end
return each(renew, #KEYS / 2)
"""
)
"""KEYS: set and string of each request. ARGV: their names. Gives what ``SETTLE`` does."""
