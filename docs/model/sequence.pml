/* The sequence check and the epoch bump of the idempotent producer: one producer, one partition.
 *
 * Batches of one record, 0..N-1. Of requests and answers any may be lost; requests overtake each other; one
 * whose sender gave it up may still arrive, at any later time. The broker may crash and rebuild what it
 * knows from its log. Every alternative below is one step of one of the parts, in any order.
 *
 *     append()                 src/oncelog/rules/idempotence/append.py    decide_append
 *     numbering, retries, gaps src/oncelog/rules/idempotence/sequencer.py   PartitionSequencer
 *     sequences                src/oncelog/rules/idempotence/sequence.py  (here without the wrap at 2^31)
 *
 * Properties (all are checked, or with -DONLY=name that one): see the numbers below. Broken variants are
 * switched on with -D: see README.md.
 */

#define LOST 1   /* an acknowledged record stays in the log */
#define TWICE 2  /* no record is stored twice */
#define ORDER 3  /* records are stored in the order in which they were sent */
#define KNOWN 4  /* without a delivery time-out every record is acknowledged, none ends as "unknown" */
#define FENCE 5  /* the producer is never fenced by itself */
#ifdef ONLY
#define CHECK(name, what) assert(ONLY != name || (what))
#elif defined(WITHOUT)
#define CHECK(name, what) assert(WITHOUT == name || (what))
#else
#define CHECK(name, what) assert(what)
#endif

/* Bounds */
#ifndef N
#define N 6 /* batches */
#endif
#ifndef LIMIT
#define LIMIT 5 /* batches in flight: sending.MAX_UNACKNOWLEDGED */
#endif
#ifndef REMEMBERED
#define REMEMBERED 5 /* append.REMEMBERED_BATCHES */
#endif
#ifndef UNKNOWNS
#define UNKNOWNS 2 /* attempts that end without an outcome */
#endif
#ifndef UNSENT
#define UNSENT 1 /* attempts that surely never left */
#endif
#ifndef CRASHES
#define CRASHES 1
#endif
#ifndef TIMEOUTS
#define TIMEOUTS 1 /* batches given up after delivery.timeout.ms */
#endif
#define ROOM (N + 2)
#define NONE 255

#ifdef EPOCH_FALLS /* as where the highest is followed by 0 */
#define FIRST_EPOCH 1
#else
#define FIRST_EPOCH 0
#endif
#ifdef UNGUARDED
#define GUARDED false /* PartitionSequencer.safe_mode */
#else
#define GUARDED true
#endif

/* The producer */
mtype = { NEW, FLYING, ACKED, UNKNOWN, FAILED };
mtype state[N] = NEW;
bool may_be_stored[N], was_lowest[N];
byte sequence[N]; /* also sending's `ordinal`: batches have one record */
byte next_new, next_sequence, epoch = FIRST_EPOCH;
bool is_known_id, has_gap;
byte unresolved = NONE;
byte lowest = NONE, lowest_unsettled = NONE, flying_count, wire_count; /* of the above, by look() */

/* The network: the attempt that the producer waits for, and one that it has given up */
mtype = { IDLE, ASKED, SAID_STORED, SAID_OUT_OF_ORDER, SAID_FENCED };
mtype wire[N] = IDLE;
bool is_late[N];
byte late_epoch[N], late_sequence[N];

/* The broker: its log, how much of it outlives a crash, and what it knows of the producer id */
byte log[ROOM], log_epoch[ROOM], log_sequence[ROOM];
byte log_end, durable_end;
byte at[N] = NONE; /* where batch k stands */
bool has_entry;
byte entry_epoch, entry_next, entry_count; /* it remembers the batches entry_next - entry_count .. entry_next - 1 */
mtype verdict;

byte unknowns, unsent, crashes, timeouts;
hidden byte i, before;

/* What follows from the batches' states */
inline look() {
	lowest = NONE; lowest_unsettled = NONE; flying_count = 0; wire_count = 0;
	for (i : 0 .. N - 1) {
		if
		:: state[i] == FLYING ->
			flying_count++;
			wire_count = wire_count + (wire[i] != IDLE);
			if
			:: lowest == NONE -> lowest = i
			:: else
			fi;
			if
			:: lowest_unsettled == NONE && may_be_stored[i] && GUARDED -> lowest_unsettled = i
			:: else
			fi
		:: else
		fi
	}
	i = 0 /* a d_step may not end in a loop */
}

/* Store, as _successor does */
inline store(k, e, s) {
	if
	:: has_entry && entry_epoch == e && entry_count < REMEMBERED -> entry_count++
	:: has_entry && entry_epoch == e && entry_count >= REMEMBERED
	:: else -> entry_count = 1
	fi;
	has_entry = true; entry_epoch = e; entry_next = s + 1
}

inline append(k, e, s) {
	if
#ifndef NO_SEQUENCE_CHECK
	:: has_entry && e == entry_epoch && s < entry_next && s + entry_count >= entry_next ->
		verdict = SAID_STORED /* Duplicate */
#ifndef NO_EPOCH_CHECK
	:: has_entry && e < entry_epoch -> verdict = SAID_FENCED
#else
	:: has_entry && e < entry_epoch && s != 0 -> verdict = SAID_OUT_OF_ORDER
#endif
	:: has_entry && e > entry_epoch && s != 0 -> verdict = SAID_OUT_OF_ORDER
	:: has_entry && e == entry_epoch && s != entry_next && !(s < entry_next && s + entry_count >= entry_next) ->
		verdict = SAID_OUT_OF_ORDER
#endif
	:: else ->
		CHECK(TWICE, at[k] == NONE);
		CHECK(ORDER, log_end == 0 || log[log_end - 1] <= k);
		at[k] = log_end; log[log_end] = k; log_epoch[log_end] = e; log_sequence[log_end] = s;
		log_end++;
		store(k, e, s);
		verdict = SAID_STORED
	fi
}

inline send(k) {
	wire[k] = ASKED;
	was_lowest[k] = has_gap || lowest == k || flying_count == 0;
}

/* Take the batch out of those in flight */
inline take(k, outcome) {
	before = 0;
	for (i : 0 .. N - 1) {
		before = before + (i < k && state[i] == FLYING)
	}
	state[k] = outcome; wire[k] = IDLE; was_lowest[k] = false; may_be_stored[k] = false; sequence[k] = 0;
	if
	:: unresolved != NONE && before < unresolved -> unresolved--
	:: else
	fi
}

/* The attempt is given up; its request may still be under way. One such per batch is kept. */
inline let_go(k) {
	if
	:: wire[k] == ASKED && !is_late[k] ->
		is_late[k] = true; late_epoch[k] = epoch; late_sequence[k] = sequence[k]
	:: else
	fi;
	wire[k] = IDLE
}

#define MAY_NUMBER (!has_gap && !(unresolved != NONE && flying_count == 0) && (flying_count == 0 || \
	(unresolved == NONE && WINDOW && flying_count == wire_count)))
#ifdef COUNT_UNACKNOWLEDGED
#define WINDOW (flying_count < LIMIT)
#else
#ifdef FIRST_NOT_ALONE
#define WINDOW (next_sequence - sequence[lowest] < LIMIT)
#else
#define WINDOW (next_sequence - sequence[lowest] < (is_known_id || !GUARDED -> LIMIT : 1))
#endif
#endif
#define MAY_RETRY(k) (state[k] == FLYING && wire[k] == IDLE && \
	((!has_gap && lowest == k) || (has_gap && wire_count == 0 && lowest_unsettled == k)))

#ifdef ANSWER_EARLY
#define MAY_ANSWER(k) true
#else
#define MAY_ANSWER(k) (at[k] < durable_end || at[k] == NONE)
#endif

proctype Batch(byte k) {
	do
	/* The producer */
	:: d_step { state[k] == NEW && next_new == k && MAY_NUMBER ->
		sequence[k] = next_sequence; next_sequence++; next_new++;
		send(k); state[k] = FLYING; look() }
	:: d_step { MAY_RETRY(k) -> send(k); look() }
	:: d_step { wire[k] == SAID_STORED && MAY_ANSWER(k) ->
		take(k, ACKED);
		is_known_id = true;
		if
		:: unresolved != NONE && before >= unresolved -> unresolved = NONE
		:: else
		fi;
		CHECK(LOST, at[k] != NONE);
		look() }
	:: d_step { wire[k] == SAID_OUT_OF_ORDER ->
		wire[k] = IDLE;
		if
		:: !was_lowest[k] /* RETRY */
		:: was_lowest[k] && may_be_stored[k] && GUARDED -> /* GIVE_UP */
			has_gap = true; take(k, UNKNOWN); CHECK(KNOWN, timeouts > 0)
		:: else -> has_gap = true /* RENUMBER */
		fi;
		look() }
	:: d_step { wire[k] == SAID_FENCED -> CHECK(FENCE, false); take(k, FAILED); has_gap = true; look() }

	/* Faults that the producer sees: no outcome, surely not sent, out of time (with and without a copy on the way) */
	:: d_step { wire[k] != IDLE && unknowns < UNKNOWNS ->
		unknowns++; may_be_stored[k] = true; let_go(k); look() }
	:: d_step { wire[k] == ASKED && unsent < UNSENT -> unsent++; wire[k] = IDLE; look() }
	:: d_step { state[k] == FLYING && timeouts < TIMEOUTS ->
		timeouts++;
		if
		:: may_be_stored[k] || wire[k] != IDLE ->
			let_go(k); take(k, UNKNOWN);
			unresolved = (unresolved == NONE || unresolved < before -> before : unresolved)
		:: else -> take(k, FAILED); has_gap = true
		fi;
		look() }

	/* The network and the broker */
	:: d_step { wire[k] == ASKED && log_end < ROOM ->
		append(k, epoch, sequence[k]); wire[k] = verdict; verdict = 0 }
	:: d_step { is_late[k] && log_end < ROOM ->
		append(k, late_epoch[k], late_sequence[k]);
		is_late[k] = false; late_epoch[k] = 0; late_sequence[k] = 0; verdict = 0 }
	:: d_step { is_late[k] -> is_late[k] = false; late_epoch[k] = 0; late_sequence[k] = 0 }
	:: state[k] != NEW && state[k] != FLYING && !is_late[k] -> break
	od
}

#ifdef NO_RESTART
#define MUST_RESTART false
#else
#define MUST_RESTART (has_gap || (unresolved != NONE && flying_count == 0))
#endif

proctype Producer() {
end:	do
	:: d_step { MUST_RESTART && wire_count == 0 && lowest_unsettled == NONE ->
#ifdef EPOCH_FALLS
		epoch--;
#elif !defined(NO_BUMP)
		epoch++;
#endif
		next_sequence = 0; has_gap = false; unresolved = NONE;
		for (i : 0 .. N - 1) {
			if
			:: state[i] == FLYING -> sequence[i] = next_sequence; next_sequence++
			:: else
			fi
		}
		i = 0 }
	od
}

/* What was written and not flushed may be lost: any suffix of it. Then the log is replayed. */
inline recover() {
	has_entry = false; entry_epoch = 0; entry_next = 0; entry_count = 0;
	for (i : 0 .. ROOM - 1) {
		if
		:: i < log_end -> store(log[i], log_epoch[i], log_sequence[i])
		:: else -> log[i] = 0; log_epoch[i] = 0; log_sequence[i] = 0
		fi
	}
#ifdef REMEMBER_ONE
	entry_count = (entry_count > 1 -> 1 : entry_count);
#endif
	for (i : 0 .. N - 1) {
		if
		:: at[i] != NONE && at[i] >= log_end ->
			at[i] = NONE;
			CHECK(LOST, state[i] != ACKED);
			if
			:: wire[i] == SAID_STORED -> wire[i] = IDLE; may_be_stored[i] = true
			:: else
			fi
		:: else
		fi
	}
	durable_end = log_end;
	look()
}

proctype Broker() {
end:	do
	:: d_step { durable_end < log_end -> durable_end = log_end }
	:: atomic { crashes < CRASHES ->
		crashes++;
		do
		:: log_end > durable_end -> log_end--
		:: break
		od;
		d_step { recover() } }
	od
}

init {
	byte k;
	atomic {
		for (k : 0 .. N - 1) { run Batch(k) }
		run Producer();
		run Broker()
	}
}
