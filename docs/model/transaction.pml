/* The transaction protocol: one transactional id, its coordinator, two partitions, read_committed readers.
 *
 * Producer A makes transactions 0 .. A_TXNS-1, its successor B one more; B may start while A still runs, and
 * both may die at any step. A transaction writes at most one record to each partition. The broker, which is
 * coordinator and both partitions, may crash: by default nothing that was written is lost (kill -9); with
 * -DPOWER each log loses what was not flushed, or a part of it. A request may come late: its sender has sent
 * it again, or given it up, and the first copy is handled at any later time.
 *
 *     init, add, verify, end, fence, complete   src/oncelog/rules/transactions/coordinator.py  decide_init ... complete
 *     append                                    src/oncelog/rules/idempotence/append.py       decide_append
 *     mark                                      src/oncelog/rules/idempotence/markers.py       decide_marker
 *     stable offset                             src/oncelog/rules/idempotence/last_stable_offset.py    last_stable_offset
 *     the order of writes and waits             src/oncelog/broker/coordinators/transactions.py, transaction_verification.py
 *     the client's calls                        src/oncelog/rules/transactions/client_session.py
 *
 * Two versions: an epoch per transaction (KIP-890), and with -DCLASSIC the one before. Properties as in
 * sequence.pml, broken variants by -D: see README.md.
 */

#define ATOMIC 1  /* what was written in a transaction is committed in both partitions or in none */
#define OUTCOME 2 /* a transaction is committed or aborted, and that is what its producer was told */
#define FENCED 3  /* once the successor has its epoch, nothing of the producer before is stored or decided */
#define READ 4    /* a reader is given records only of transactions whose commit was asked for and is durable */
#define STABLE 5  /* the last stable offset never goes back */
#define LOST 6    /* what was acknowledged in a transaction that was told to be committed is committed */
#define TWICE 7   /* no record is stored twice */
#define CLOSED 8  /* in the end no transaction is open anywhere */
#ifdef ONLY
#define CHECK(name, what) assert(ONLY != name || (what))
#elif defined(WITHOUT)
#define CHECK(name, what) assert(WITHOUT == name || (what))
#else
#define CHECK(name, what) assert(what)
#endif

/* Bounds */
#ifndef A_TXNS
#define A_TXNS 2
#endif
#define TXNS (A_TXNS + 1)
#ifndef LATE
#define LATE 1 /* requests that come late */
#endif
#ifndef CRASHES
#define CRASHES 1
#endif
#ifndef TIMEOUTS
#define TIMEOUTS 1 /* transactions aborted by the coordinator while their producer may be alive */
#endif
#define ROOM 12
#define NONE 255
#define COMMIT 100 /* markers in a log; records are numbers of transactions */
#define ABORT 101

/* The coordinator's entry in memory, and the part of it that would survive a power loss */
mtype = { EMPTY, ONGOING, PREPARE_COMMIT, PREPARE_ABORT, COMPLETE_COMMIT, COMPLETE_ABORT };
mtype state = EMPTY, disk_state = EMPTY;
byte epoch = NONE, last_epoch = NONE, disk_epoch = NONE; /* NONE: before the first */
bool has_part[2], disk_has_part[2], is_flushed = true;
bool must_mark[2];
byte decided_by = NONE; /* the transaction whose EndTxn made PREPARE_COMMIT */
#define IS_PREPARED (state == PREPARE_COMMIT || state == PREPARE_ABORT)
#ifdef NO_FENCING
#define MAY_INIT true
#else
#define MAY_INIT (!IS_PREPARED)
#endif

/* The partitions: log, producer state, and the position of readers */
typedef Partition {
	byte log[ROOM];
	byte log_epoch[ROOM];
	byte end, flushed_end;
	bool has_entry;
	byte epoch, next_sequence;
	byte open_first = NONE;
	byte read_end
}
Partition part[2];

/* The outcome of transaction t's record in partition p, and of the transaction */
mtype = { ABSENT, OPEN, COMMITTED, ABORTED };
typedef Transaction {
	mtype fate[2] = ABSENT;
	bool is_acked[2];
	bool is_decided; /* its commit, durably */
	bool told_commit, told_abort
}
Transaction txn[TXNS];
bool has_begun_a, is_fenced; /* A has its epoch, B has its own */

/* The network's late copy */
mtype = { NOTHING, ADD, PRODUCE, END };
mtype late = NOTHING;
byte late_p, late_epoch, late_sequence, late_txn, late_count;
bool late_commit, is_late_held;

byte crashes, timeouts, done_count;
bool lost_answers[2]; /* the broker crashed while the producer waited */
mtype = { OK, RETRY, REFUSED, FENCED_OFF, HELD };
mtype answer;
hidden byte i, j, stable, entry, entry_epoch;

#ifdef POWER
#define FLUSH_AT_ONCE(q) skip
#define PERSIST is_flushed = false
#else
#define FLUSH_AT_ONCE(q) part[q].flushed_end = part[q].end
#define PERSIST flush()
#endif

/* The partitions */

inline read_on(q) {
#ifdef READ_PAST_STABLE
	stable = part[q].end;
#else
	stable = (part[q].open_first == NONE -> part[q].end : part[q].open_first);
#endif
	CHECK(STABLE, stable >= part[q].read_end);
	for (j : part[q].read_end .. ROOM - 1) {
		if
		:: j < stable && part[q].log[j] < TXNS ->
			CHECK(READ, txn[part[q].log[j]].fate[q] == ABORTED || txn[part[q].log[j]].is_decided)
		:: else
		fi
	}
	part[q].read_end = stable
}

inline note_record(q, t, e) {
	part[q].next_sequence = (part[q].has_entry && part[q].epoch == e -> part[q].next_sequence + 1 : 1);
	part[q].has_entry = true; part[q].epoch = e;
	part[q].open_first = (part[q].open_first == NONE -> part[q].end : part[q].open_first);
	txn[t].fate[q] = OPEN;
	part[q].end++
}

inline note_marker(q, e, is_commit) {
	part[q].next_sequence = (part[q].has_entry && part[q].epoch == e -> part[q].next_sequence : 0);
	part[q].has_entry = true; part[q].epoch = e;
	part[q].open_first = NONE;
	for (j : 0 .. TXNS - 1) {
		txn[j].fate[q] = (txn[j].fate[q] == OPEN -> (is_commit -> COMMITTED : ABORTED) : txn[j].fate[q])
	}
	part[q].end++
}

inline append(q, e, s, t) {
	if
#ifndef NO_SEQUENCE_CHECK
	:: part[q].has_entry && part[q].epoch == e && s < part[q].next_sequence -> answer = OK /* Duplicate */
#endif
#ifndef NO_PARTITION_EPOCH
	:: part[q].has_entry && e < part[q].epoch -> answer = REFUSED
#endif
	:: part[q].has_entry && e > part[q].epoch && s != 0 -> answer = REFUSED
	:: part[q].has_entry && e == part[q].epoch && s > part[q].next_sequence -> answer = REFUSED
	:: else ->
		CHECK(TWICE, txn[t].fate[q] == ABSENT);
		CHECK(FENCED, !is_fenced || t == A_TXNS);
		part[q].log[part[q].end] = t; part[q].log_epoch[part[q].end] = e;
		note_record(q, t, e);
		FLUSH_AT_ONCE(q);
		read_on(q);
		answer = OK
	fi
}

inline mark(q, e, is_commit) {
	if
	:: part[q].has_entry && e < part[q].epoch /* refused: a newer epoch was here */
	:: else ->
		part[q].log[part[q].end] = (is_commit -> COMMIT : ABORT); part[q].log_epoch[part[q].end] = e;
		note_marker(q, e, is_commit);
		for (j : 0 .. TXNS - 1) {
			CHECK(ATOMIC, txn[j].fate[0] != COMMITTED || txn[j].fate[1] != ABORTED);
			CHECK(ATOMIC, txn[j].fate[0] != ABORTED || txn[j].fate[1] != COMMITTED);
			CHECK(OUTCOME, !txn[j].told_commit || txn[j].fate[q] != ABORTED);
			CHECK(OUTCOME, !txn[j].told_abort || txn[j].fate[q] != COMMITTED)
		}
		FLUSH_AT_ONCE(q);
		read_on(q)
	fi
}

/* The coordinator */

inline flush() {
	is_flushed = true;
	disk_state = state; disk_epoch = epoch; disk_has_part[0] = has_part[0]; disk_has_part[1] = has_part[1];
	if
	:: state == PREPARE_COMMIT && decided_by != NONE ->
		CHECK(OUTCOME, !txn[decided_by].told_abort);
		CHECK(FENCED, !is_fenced || decided_by == A_TXNS);
		txn[decided_by].is_decided = true
	:: else
	fi
}

inline prepare(is_commit, raises_epoch, t) {
	state = (is_commit -> PREPARE_COMMIT : PREPARE_ABORT);
	last_epoch = (raises_epoch -> epoch : NONE);
	epoch = epoch + raises_epoch;
	decided_by = t;
	must_mark[0] = has_part[0]; must_mark[1] = has_part[1];
#ifdef ONE_MARKER
	if
	:: must_mark[0] -> must_mark[1] = false
	:: else
	fi;
#endif
	PERSIST
}

inline fence() {
#ifdef CLASSIC
	epoch++;
	prepare(false, 0, NONE)
#else
	prepare(false, 1, NONE)
#endif
}

/* `given` NONE: a new instance */
inline handle_init(given) {
	if
#ifndef NO_FENCING
	:: IS_PREPARED -> answer = RETRY
	:: state == ONGOING -> fence(); answer = RETRY
#endif
	:: else ->
		if
		:: given != NONE && given != epoch && given != last_epoch -> answer = FENCED_OFF
		:: given != NONE && given == last_epoch && given != epoch -> answer = OK
		:: else ->
#ifdef NO_FENCING
			epoch = (epoch == NONE -> 0 : epoch);
#else
			last_epoch = (given == NONE -> NONE : epoch);
			epoch = (epoch == NONE -> 0 : epoch + 1);
			state = EMPTY;
#endif
			PERSIST;
			answer = OK
		fi
	fi
}

inline handle_add(q, e) {
	if
	:: e != epoch -> answer = FENCED_OFF
	:: e == epoch && IS_PREPARED -> answer = RETRY
	:: e == epoch && state == ONGOING && has_part[q] -> answer = OK
	:: else -> state = ONGOING; last_epoch = NONE; has_part[q] = true; PERSIST; answer = OK
	fi
}

/* With an epoch per transaction Produce adds its partition, else it must have been added. Nothing is stored
 * before it is durable that it was: HELD requests are asked again then. */
#ifdef STORE_EARLY
#define MAY_STORE true
#else
#define MAY_STORE is_flushed
#endif
inline handle_produce(q, e, s, t) {
	if
#ifdef NO_VERIFICATION
	:: true -> append(q, e, s, t)
#endif
	:: part[q].open_first != NONE && part[q].epoch == e -> append(q, e, s, t)
	:: else ->
#ifdef CLASSIC
		if
		:: e != epoch -> answer = REFUSED
		:: e == epoch && IS_PREPARED -> answer = RETRY
		:: e == epoch && state == ONGOING && has_part[q] -> append(q, e, s, t)
		:: else -> answer = REFUSED
		fi
#else
		handle_add(q, e);
		if
		:: answer == OK && MAY_STORE -> append(q, e, s, t)
		:: answer == OK && !MAY_STORE -> answer = HELD
		:: answer == FENCED_OFF -> answer = REFUSED
		:: else
		fi
#endif
	fi
}

#define IS_DONE(is_commit) (state == (is_commit -> COMPLETE_COMMIT : COMPLETE_ABORT))
#define IS_BEING_DONE(is_commit) (state == (is_commit -> PREPARE_COMMIT : PREPARE_ABORT))

inline handle_end(e, is_commit, t) {
	if
#ifdef CLASSIC
	:: e != epoch -> answer = FENCED_OFF
	:: e == epoch && state == ONGOING -> prepare(is_commit, 0, t); answer = OK
	:: e == epoch && state != ONGOING ->
		answer = (IS_DONE(is_commit) -> OK : (IS_BEING_DONE(is_commit) -> RETRY : REFUSED))
#else
	:: state != EMPTY && state != ONGOING && epoch == e + 1 ->
		answer = (IS_DONE(is_commit) -> OK : (IS_BEING_DONE(is_commit) -> RETRY : REFUSED))
	:: e == epoch && state == ONGOING -> prepare(is_commit, 1, t); answer = OK
	:: e == epoch && state != ONGOING && !IS_PREPARED && is_commit -> answer = REFUSED
	:: e == epoch && state != ONGOING && !IS_PREPARED && !is_commit ->
		has_part[0] = false; has_part[1] = false; prepare(false, 1, t); answer = OK
	:: else -> answer = FENCED_OFF
#endif
	fi
}

#ifdef EARLY_MARKERS
#define IS_DECISION_DURABLE true
#else
#define IS_DECISION_DURABLE is_flushed
#endif
#ifdef EARLY_COMPLETION
#define ARE_MARKERS_DURABLE true
#else
#define ARE_MARKERS_DURABLE ((!has_part[0] || part[0].flushed_end == part[0].end) && \
	(!has_part[1] || part[1].flushed_end == part[1].end))
#endif

/* A crash: memory is read back from the logs, decisions are carried out again */
inline recover(q) {
	part[q].has_entry = false; part[q].epoch = 0; part[q].next_sequence = 0; part[q].open_first = NONE;
	i = part[q].end; part[q].end = 0;
	for (j : 0 .. TXNS - 1) { txn[j].fate[q] = ABSENT }
	do
	:: part[q].end < i ->
		entry = part[q].log[part[q].end]; entry_epoch = part[q].log_epoch[part[q].end];
		if
		:: entry < TXNS -> note_record(q, entry, entry_epoch)
		:: else -> note_marker(q, entry_epoch, entry == COMMIT)
		fi
	:: else -> break
	od;
	for (j : i .. ROOM - 1) { part[q].log[j] = 0; part[q].log_epoch[j] = 0 }
	part[q].flushed_end = i;
	/* Readers may have been ahead of what was flushed. */
	stable = (part[q].open_first == NONE -> i : part[q].open_first);
	part[q].read_end = (part[q].read_end > stable -> stable : part[q].read_end)
}

inline resume() {
#ifdef ABORT_AT_START
	state = (state == PREPARE_COMMIT -> PREPARE_ABORT : state);
#endif
	last_epoch = NONE;
#ifdef NO_RESUME
	must_mark[0] = false; must_mark[1] = false
#else
	must_mark[0] = IS_PREPARED && has_part[0]; must_mark[1] = IS_PREPARED && has_part[1]
#endif
}

proctype Broker() {
	byte p;
end:	do
	:: d_step { IS_PREPARED && IS_DECISION_DURABLE && must_mark[0] ->
		mark(0, epoch, state == PREPARE_COMMIT); must_mark[0] = false }
	:: d_step { IS_PREPARED && IS_DECISION_DURABLE && must_mark[1] ->
		mark(1, epoch, state == PREPARE_COMMIT); must_mark[1] = false }
	:: d_step { IS_PREPARED && IS_DECISION_DURABLE && !must_mark[0] && !must_mark[1] && ARE_MARKERS_DURABLE ->
		state = (state == PREPARE_COMMIT -> COMPLETE_COMMIT : COMPLETE_ABORT);
		decided_by = NONE; has_part[0] = false; has_part[1] = false;
		PERSIST; i = 0 }
	:: d_step { state == ONGOING && (timeouts < TIMEOUTS || done_count == 2) ->
		timeouts = (timeouts < TIMEOUTS -> timeouts + 1 : timeouts);
		fence(); i = 0 }
#ifdef POWER
	:: d_step { !is_flushed -> flush(); i = 0 }
	:: d_step { part[0].flushed_end < part[0].end -> part[0].flushed_end = part[0].end }
	:: d_step { part[1].flushed_end < part[1].end -> part[1].flushed_end = part[1].end }
	:: atomic { crashes < CRASHES ->
		crashes++;
		for (p : 0 .. 1) {
			do
			:: part[p].end > part[p].flushed_end -> part[p].end--
			:: break
			od
		}
		p = 0;
		d_step {
			recover(0); recover(1);
			if
			:: !is_flushed -> decided_by = NONE
			:: else
			fi;
			state = disk_state; epoch = disk_epoch;
			has_part[0] = disk_has_part[0]; has_part[1] = disk_has_part[1];
			is_flushed = true; lost_answers[0] = true; lost_answers[1] = true;
			resume(); i = 0
		} }
#else
	:: d_step { crashes < CRASHES -> crashes++; resume(); i = 0 }
#endif
	od
}

proctype Network() {
end:	do
	:: d_step { late != NOTHING && (!is_late_held || is_flushed) ->
		if
		:: late == ADD -> handle_add(late_p, late_epoch)
		:: late == PRODUCE -> handle_produce(late_p, late_epoch, late_sequence, late_txn)
		:: late == END -> handle_end(late_epoch, late_commit, late_txn)
		fi;
		is_late_held = (answer == HELD);
		if
		:: !is_late_held ->
			late = NOTHING; late_p = 0; late_epoch = 0; late_sequence = 0; late_txn = 0; late_commit = false
		:: else
		fi;
		answer = 0; i = 0 }
	od
}

inline put_late(kind, q, e, s, t, is_commit) {
	late_count++;
	late = kind; late_p = q; late_epoch = e; late_sequence = s; late_txn = t; late_commit = is_commit
}

/* A request. It may be sent a second time while the first copy is late, with -DPROMPT only while the first
 * one's answer is lost. Or its sender never does anything else. */
#ifdef ONLY_RECORDS_LATE
#define MAY_BE_LATE(kind) (kind == PRODUCE)
#else
#define MAY_BE_LATE(kind) true
#endif
#ifdef PROMPT
#define FIRST_COPY(kind, q, e, s, t, is_commit, handle) late_count < LATE -> \
	late_count++; d_step { handle; answer = 0; i = 0 }
#else
#define FIRST_COPY(kind, q, e, s, t, is_commit, handle) late_count < LATE && late == NOTHING && MAY_BE_LATE(kind) -> \
	put_late(kind, q, e, s, t, is_commit)
#endif
#define ASK(kind, q, e, s, t, is_commit, handle) \
	lost_answers[me] = false; \
	if \
	:: true \
	:: FIRST_COPY(kind, q, e, s, t, is_commit, handle) \
	:: goto dead \
	:: FIRST_COPY(kind, q, e, s, t, is_commit, handle); goto dead \
	fi; \
	d_step { handle; i = 0 }

/* An answer waits until its contents are durable; a crash loses it. */
#ifdef ANSWER_EARLY
#define IF_DURABLE(what) true
#else
#define IF_DURABLE(what) (!lost_answers[me] && is_flushed && (what))
#endif

proctype Producer(byte me, first, last) {
	byte mine, next_mine, t, p, next[2];
	bool must_abort, has_begun, commits;
	mtype said;

	/* InitProducerId, again until an earlier transaction is ended */
start:	atomic {
		if
		:: MAY_INIT && (me == 0 || has_begun_a || done_count == 1) -> skip
		:: goto dead
		fi;
		lost_answers[me] = false;
		d_step { handle_init(NONE); i = 0 }
		mine = epoch; said = answer; answer = 0;
		if
		:: said == RETRY -> said = 0; goto start
		:: else -> said = 0
		fi
	}
	atomic {
		if
		:: IF_DURABLE(true)
		:: lost_answers[me] -> goto start
		fi;
		has_begun_a = true; is_fenced = (me == 1); t = first
	}

begin:	if
	:: t > last -> goto dead
	:: t <= last -> p = 0
	fi;
write:	if
	:: p == 2 || must_abort -> goto end_it
	:: p < 2 && !must_abort -> p++; goto write /* nothing for this partition */
	:: p < 2 && !must_abort -> skip
	fi;
#ifdef CLASSIC
add:	atomic {
		ASK(ADD, p, mine, 0, t, false, handle_add(p, mine));
		said = answer; answer = 0;
		if
		:: said == RETRY -> said = 0; goto wait_add
		:: said == FENCED_OFF -> said = 0; goto dead
		:: else -> said = 0
		fi
	}
	atomic {
		if
		:: IF_DURABLE(true)
		:: lost_answers[me] -> goto add
		fi;
		has_begun = true
	}
#else
	has_begun = true;
#endif
produce:
	atomic {
		if
		:: true
		:: FIRST_COPY(PRODUCE, p, mine, next[p], t, false, handle_produce(p, mine, next[p], t)); goto give_up
		fi;
		ASK(PRODUCE, p, mine, next[p], t, false, handle_produce(p, mine, next[p], t));
		said = answer; answer = 0;
		if
		:: said == RETRY -> said = 0; goto wait_produce
		:: said == HELD -> said = 0; goto held
		:: said == REFUSED -> said = 0; goto give_up
		:: else -> said = 0
		fi
	}
	atomic {
		if
		:: IF_DURABLE(part[p].flushed_end == part[p].end)
		:: lost_answers[me] -> goto produce
		fi;
		txn[t].is_acked[p] = true; next[p]++; p++;
		goto write
	}
give_up:
	must_abort = true;
	goto write;

end_it:	atomic {
		if
		:: !has_begun -> goto ended
		:: has_begun && !must_abort -> commits = true
		:: has_begun -> commits = false
		fi
	}
end_now:
	atomic {
		ASK(END, 0, mine, 0, t, commits, handle_end(mine, commits, t));
		said = answer; answer = 0; next_mine = epoch;
		if
		:: said == RETRY -> said = 0; next_mine = 0; goto wait_end
		:: said == FENCED_OFF || said == REFUSED -> goto dead
		:: else -> said = 0
		fi
	}
	atomic {
		if
		:: IF_DURABLE(true)
		:: lost_answers[me] -> next_mine = 0; goto end_now
		fi;
		d_step {
			if
			:: commits -> CHECK(OUTCOME, txn[t].is_decided); txn[t].told_commit = true
			:: else -> CHECK(OUTCOME, !txn[t].is_decided); txn[t].told_abort = true
			fi;
#ifndef CLASSIC
			mine = next_mine; next[0] = 0; next[1] = 0;
#endif
			next_mine = 0; commits = false
		}
	}
#if defined(CLASSIC) && !defined(NO_NEW_EPOCH)
	/* A record that was given up may still come: only another epoch keeps it out of the next transaction. */
again:	atomic {
		if
		:: !must_abort -> goto ended
		:: must_abort && !IS_PREPARED -> skip
		:: goto dead
		fi;
		lost_answers[me] = false;
		d_step { handle_init(mine); i = 0 }
		next_mine = epoch; said = answer; answer = 0;
		if
		:: said == RETRY -> said = 0; next_mine = 0; goto again
		:: said == FENCED_OFF -> goto dead
		:: else -> said = 0
		fi
	}
	atomic {
		if
		:: IF_DURABLE(true)
		:: lost_answers[me] -> next_mine = 0; goto again
		fi;
		mine = next_mine; next_mine = 0; next[0] = 0; next[1] = 0
	}
#endif
ended:	atomic { must_abort = false; has_begun = false; p = 0; t++ }
	goto begin;

#ifdef CLASSIC
wait_add:
	!IS_PREPARED; goto add;
#endif
wait_produce:
	!IS_PREPARED; goto produce;
held:	is_flushed || lost_answers[me]; goto produce;
wait_end:
	!IS_PREPARED; goto end_now;

dead:	atomic {
		done_count++; said = 0; answer = 0; mine = 0; next_mine = 0; t = 0; p = 0; next[0] = 0; next[1] = 0;
		must_abort = false; has_begun = false; commits = false; lost_answers[me] = false
	}
}

/* When nothing more can happen */
proctype Judge() {
	timeout;
	d_step {
		CHECK(CLOSED, state != ONGOING && !IS_PREPARED);
		CHECK(CLOSED, part[0].open_first == NONE && part[1].open_first == NONE);
		for (j : 0 .. TXNS - 1) {
			CHECK(LOST, !txn[j].told_commit || !txn[j].is_acked[0] || txn[j].fate[0] == COMMITTED);
			CHECK(LOST, !txn[j].told_commit || !txn[j].is_acked[1] || txn[j].fate[1] == COMMITTED);
			CHECK(ATOMIC, txn[j].fate[0] != COMMITTED || !txn[j].is_acked[1] || txn[j].fate[1] == COMMITTED);
			CHECK(ATOMIC, txn[j].fate[1] != COMMITTED || !txn[j].is_acked[0] || txn[j].fate[0] == COMMITTED)
		}
		j = 0
	}
}

init {
	atomic {
		run Broker();
		run Network();
		run Producer(0, 0, A_TXNS - 1);
		run Producer(1, A_TXNS, A_TXNS);
		run Judge()
	}
}
