/* The records that a read_committed reader gets of one partition: several producers' transactions, one log, one reader.
 *
 * Each producer has at most one transaction open; records and markers come in any order. A fetch returns the records
 * between the reader's position and any offset up to the last stable one, with the aborted
 * transactions that the index names for it.
 *
 *     last stable offset, index entry  src/oncelog/rules/idempotence/last_stable_offset.py   last_stable_offset, stable_offset_after
 *     completed transaction            src/oncelog/rules/idempotence/markers.py      decide_marker
 *     index search                     src/oncelog/log/segments.py      aborted_transactions
 *     filter                           src/oncelog/rules/storage/read_committed.py  VisibilityFilter
 */

#define STABLE 1 /* the last stable offset never goes back */
#define READ 2   /* no record of an open or aborted transaction reaches the application */
#define LOST 3   /* every record of a committed transaction that the reader has passed reached it */
#ifdef ONLY
#define CHECK(name, what) assert(ONLY != name || (what))
#elif defined(WITHOUT)
#define CHECK(name, what) assert(WITHOUT == name || (what))
#else
#define CHECK(name, what) assert(what)
#endif

#ifndef IDS
#define IDS 2 /* producer ids */
#endif
#ifndef LENGTH
#define LENGTH 7 /* batches in the log, markers among them */
#endif
#define NONE 255

mtype = { FREE, OPEN, COMMITTED, ABORTED, COMMIT_MARKER, ABORT_MARKER };
mtype log[LENGTH] = FREE; /* a record's fate, or a marker */
byte owner[LENGTH];       /* its producer id */
byte log_end, stable, position;
byte open_first[IDS] = NONE;

/* The index of aborted transactions, by their markers' offsets */
bool is_aborted[LENGTH];
byte aborted_first[LENGTH], aborted_stable[LENGTH];
hidden byte i, j, oldest;
hidden byte is_named[LENGTH], drops[IDS], is_searching; /* bits cannot be hidden */

/* First offset of the oldest open transaction, `otherwise` without one */
inline find_oldest(otherwise) {
	oldest = NONE;
	for (j : 0 .. IDS - 1) {
#ifdef NEWEST_OPEN
		oldest = (open_first[j] != NONE && (oldest == NONE || open_first[j] > oldest) -> open_first[j] : oldest)
#else
		oldest = (open_first[j] < oldest -> open_first[j] : oldest)
#endif
	}
	oldest = (oldest == NONE -> otherwise : oldest)
}

inline move_stable() {
	find_oldest(log_end);
#ifdef READ_PAST_STABLE
	oldest = log_end;
#endif
	CHECK(STABLE, oldest >= stable);
	stable = oldest
}

inline filter(upper) {
	is_searching = true;
	for (i : 0 .. LENGTH - 1) { /* the index: entries in order, until one says that the rest is later */
		is_named[i] = is_searching && is_aborted[i] && i >= position && aborted_first[i] < upper;
		is_searching = is_searching && !(is_aborted[i] && aborted_stable[i] >= upper)
	}
	for (j : 0 .. IDS - 1) { drops[j] = false }
	for (i : position .. LENGTH - 1) {
		if
		:: i < upper ->
#ifndef NO_ABORTED_LIST
			for (j : 0 .. LENGTH - 1) {
				if
				:: is_named[j] && aborted_first[j] <= i -> drops[owner[j]] = true; is_named[j] = false
				:: else
				fi
			}
#endif
			if
#ifdef DROP_FOR_EVER
			:: log[i] == ABORT_MARKER
#else
			:: log[i] == ABORT_MARKER -> drops[owner[i]] = false
#endif
			:: log[i] == OPEN || log[i] == ABORTED -> CHECK(READ, drops[owner[i]])
			:: log[i] == COMMITTED -> CHECK(LOST, !drops[owner[i]])
			:: log[i] == COMMIT_MARKER
			fi
		:: else
		fi
	}
	position = upper; is_searching = false; i = 0
}

proctype Producer(byte id) {
end:	do
	:: d_step { log_end < LENGTH ->
		log[log_end] = OPEN; owner[log_end] = id;
		open_first[id] = (open_first[id] == NONE -> log_end : open_first[id]);
		log_end++;
		move_stable(); i = 0 }
	:: d_step { log_end < LENGTH ->
		for (i : 0 .. LENGTH - 1) {
			log[i] = (log[i] == OPEN && owner[i] == id -> COMMITTED : log[i])
		}
		log[log_end] = COMMIT_MARKER; owner[log_end] = id; open_first[id] = NONE;
		log_end++;
		move_stable(); i = 0 }
	:: d_step { log_end < LENGTH ->
		for (i : 0 .. LENGTH - 1) {
			log[i] = (log[i] == OPEN && owner[i] == id -> ABORTED : log[i])
		}
		log[log_end] = ABORT_MARKER; owner[log_end] = id;
		is_aborted[log_end] = (open_first[id] != NONE);
		aborted_first[log_end] = (open_first[id] == NONE -> 0 : open_first[id]);
		open_first[id] = NONE;
		find_oldest(log_end + 1);
		aborted_stable[log_end] = (is_aborted[log_end] -> oldest : 0);
#ifdef STOP_EARLY
		aborted_stable[log_end] = (is_aborted[log_end] -> log_end + 1 : 0);
#endif
		log_end++;
		move_stable(); i = 0 }
	od
}

proctype Reader() {
	byte upper;
end:	do
	:: atomic { position < stable ->
		upper = position + 1;
		do
		:: upper < stable -> upper++
		:: break
		od;
		i = 0;
		d_step { filter(upper) }
		upper = 0 }
	od
}

init {
	byte id;
	atomic {
		for (id : 0 .. IDS - 1) { run Producer(id) }
		run Reader()
	}
}
