/* The loops of oncelog/log/scan.py over the batches in a chunk of a log file, and over many batch headers. The Python
   functions are the oracle.

   Guard: tests/log/test_log_scan.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_big_endian.h"

enum { HEADER_BYTES = 61, OVERHEAD_BYTES = 12, CRC_START = 21, TRANSACTIONAL_BIT = 0x10, CONTROL_BIT = 0x20 };
/* Positions of fields in a header. */
enum {
    LENGTH = 8,
    LEADER_EPOCH = 12,
    MAGIC = 16,
    CRC = 17,
    ATTRIBUTES = 21,
    LAST_OFFSET_DELTA = 23,
    MAX_TIMESTAMP = 35,
    PRODUCER_ID = 43,
    PRODUCER_EPOCH = 51,
    RECORDS_COUNT = 57,
};

/* Return the sum. Only positions beyond any file give a sum of more than 64 bits, which wraps around. */
static int64_t
sum_of(int64_t a, int64_t b)
{
    return (int64_t)((uint64_t)a + (uint64_t)b);
}

static int64_t
difference_of(int64_t a, int64_t b)
{
    return (int64_t)((uint64_t)a - (uint64_t)b);
}

/* Find the last offset of a batch. Return 0 if it has more than 64 bits: then it is in no range of offsets. */
static int
find_last_offset(const unsigned char *header, int64_t *last_offset)
{
    int64_t base = i64_at(header), delta = i32_at(header + LAST_OFFSET_DELTA);
    if (delta < 0 ? base < INT64_MIN - delta : base > INT64_MAX - delta)
        return 0;
    *last_offset = base + delta;
    return 1;
}

/* Return 1 if the checksum of the batch is right, 0 if it is wrong, -1 after an exception. */
static int
has_right_checksum(PyObject *crc32c, const unsigned char *batch, Py_ssize_t size)
{
    PyObject *covered = PyMemoryView_FromMemory((char *)batch + CRC_START, size - CRC_START, PyBUF_READ);
    if (covered == NULL)
        return -1;
    PyObject *computed = PyObject_CallOneArg(crc32c, covered);
    Py_DECREF(covered);
    if (computed == NULL)
        return -1;
    unsigned long crc = PyLong_AsUnsignedLong(computed);
    Py_DECREF(computed);
    if (crc == (unsigned long)-1 && PyErr_Occurred())
        return -1;
    return crc == u32_at(batch + CRC);
}

/* A growing array of `count` headers, with memory for `room` headers. Its size depends on the number of headers
   found, never on a length in the data. */
struct headers {
    char *bytes;
    Py_ssize_t count, room;
};

static int
add_header(struct headers *headers, const unsigned char *batch)
{
    if (headers->count == headers->room) {
        Py_ssize_t room = headers->room ? 2 * headers->room : 64;
        char *grown = PyMem_Realloc(headers->bytes, (size_t)room * HEADER_BYTES);
        if (grown == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        headers->bytes = grown;
        headers->room = room;
    }
    memcpy(headers->bytes + headers->count++ * HEADER_BYTES, batch, HEADER_BYTES);
    return 0;
}

static PyObject *
joined(const struct headers *headers)
{
    return PyBytes_FromStringAndSize(headers->count ? headers->bytes : "", headers->count * HEADER_BYTES);
}

static Py_ssize_t
size_of(const unsigned char *batch)
{
    return (Py_ssize_t)i32_at(batch + LENGTH) + OVERHEAD_BYTES;
}

PyDoc_STRVAR(whole_batches_doc,
             "whole_batches(data, crc32c)\n--\n\n"
             "Return the headers of the whole batches at the start of `data`, and the position after the last one.\n\n"
             "A batch is whole if all of its bytes are in `data`, its magic is 2, and its checksum is right.");

static PyObject *
whole_batches(PyObject *module, PyObject *args)
{
    Py_buffer view;
    PyObject *crc32c, *result = NULL;
    if (!PyArg_ParseTuple(args, "y*O:whole_batches", &view, &crc32c))
        return NULL;
    const unsigned char *data = view.buf;
    Py_ssize_t position = 0;
    struct headers headers = {NULL, 0, 0};
    while (view.len - position >= HEADER_BYTES) {
        const unsigned char *batch = data + position;
        Py_ssize_t size = size_of(batch);
        if (size < HEADER_BYTES || size > view.len - position || batch[MAGIC] != 2)
            break;
        int is_right = has_right_checksum(crc32c, batch, size);
        if (is_right < 0 || (is_right && add_header(&headers, batch) < 0))
            goto done;
        if (!is_right)
            break;
        position += size;
    }
    result = Py_BuildValue("(Nn)", joined(&headers), position);
done:
    PyMem_Free(headers.bytes);
    PyBuffer_Release(&view);
    return result;
}

PyDoc_STRVAR(find_headers_doc,
             "find_headers(data, position, limit, max_count)\n--\n\n"
             "Return up to `max_count` batch headers in `data` from `position` on, and the position after the last\n"
             "batch.\n\n"
             "A batch must end at or before `limit`, which may be behind the end of `data`. No other check is done.");

static PyObject *
find_headers(PyObject *module, PyObject *args)
{
    Py_buffer view;
    Py_ssize_t position, limit, max_count;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*nnn:find_headers", &view, &position, &limit, &max_count))
        return NULL;
    struct headers headers = {NULL, 0, 0};
    while (position >= 0 && position <= view.len - HEADER_BYTES && headers.count < max_count) {
        const unsigned char *batch = (unsigned char *)view.buf + position;
        Py_ssize_t size = size_of(batch);
        if (size < HEADER_BYTES || limit < position || size > limit - position)
            break;
        if (add_header(&headers, batch) < 0)
            goto done;
        position += size;
    }
    result = Py_BuildValue("(Nn)", joined(&headers), position);
done:
    PyMem_Free(headers.bytes);
    PyBuffer_Release(&view);
    return result;
}

PyDoc_STRVAR(count_plausible_doc,
             "count_plausible(headers, base_offset)\n--\n\n"
             "Return the number of headers before the first one that cannot belong to the segment, and the size of\n"
             "their batches.");

static PyObject *
count_plausible(PyObject *module, PyObject *args)
{
    Py_buffer view;
    long long base_offset;
    if (!PyArg_ParseTuple(args, "y*L:count_plausible", &view, &base_offset))
        return NULL;
    const unsigned char *header = view.buf;
    Py_ssize_t count = 0, total = view.len / HEADER_BYTES;
    int64_t size_bytes = 0;
    for (; count < total; count++, header += HEADER_BYTES) {
        int64_t offset = i64_at(header);
        int is_in_segment = offset >= base_offset && (uint64_t)offset - (uint64_t)base_offset < (uint64_t)1 << 31;
        if (header[MAGIC] != 2 || i32_at(header + LAST_OFFSET_DELTA) < 0 || !is_in_segment)
            break;
        size_bytes += size_of(header);
    }
    PyBuffer_Release(&view);
    return Py_BuildValue("(nL)", count, (long long)size_bytes);
}

/* Append a number to a list. Return -1 after an exception. */
static int
append_number(PyObject *list, int64_t value)
{
    PyObject *number = PyLong_FromLongLong(value);
    if (number == NULL)
        return -1;
    int result = PyList_Append(list, number);
    Py_DECREF(number);
    return result;
}

PyDoc_STRVAR(index_headers_doc,
             "index_headers(headers, state, base_offset, max_offset, interval_bytes)\n--\n\n"
             "Return the new state, the index entries of these batches, and what else `IndexEntries` has; None if a\n"
             "batch does not follow the one before it.");

static PyObject *
index_headers(PyObject *module, PyObject *args)
{
    Py_buffer view;
    long long position, end_offset, unindexed, max_time, max_time_offset, base_offset, max_offset, interval;
    if (!PyArg_ParseTuple(args, "y*(LLLLL)LLL:index_headers", &view, &position, &end_offset, &unindexed, &max_time,
                          &max_time_offset, &base_offset, &max_offset, &interval))
        return NULL;
    int64_t last_begin = end_offset;
    int has_gaps = 0;
    PyObject *result = NULL, *columns[4] = {NULL, NULL, NULL, NULL};
    for (int i = 0; i < 4; i++)
        if ((columns[i] = PyList_New(0)) == NULL)
            goto done;
    const unsigned char *header = view.buf, *stop = header + view.len / HEADER_BYTES * HEADER_BYTES;
    for (; header < stop; header += HEADER_BYTES) {
        int64_t offset = i64_at(header), delta = i32_at(header + LAST_OFFSET_DELTA), size = size_of(header);
        int64_t last_offset = 0, time = i64_at(header + MAX_TIMESTAMP);
        int is_next = offset >= end_offset && delta >= 0 && find_last_offset(header, &last_offset);
        /* INT64_MAX has no next offset. The caller's maximum is lower. */
        if (!is_next || last_offset > max_offset || last_offset == INT64_MAX) {
            result = Py_NewRef(Py_None);
            goto done;
        }
        has_gaps |= offset != end_offset || i32_at(header + RECORDS_COUNT) != delta + 1;
        last_begin = end_offset;
        end_offset = last_offset + 1;
        if (time > max_time) {
            max_time = time;
            max_time_offset = last_offset;
        }
        if (unindexed > interval) {
            if (append_number(columns[0], difference_of(last_offset, base_offset)) < 0 ||
                append_number(columns[1], position) < 0)
                goto done;
            if (max_time >= 0 && (append_number(columns[2], max_time) < 0 ||
                                  append_number(columns[3], difference_of(max_time_offset, base_offset)) < 0))
                goto done;
            unindexed = 0;
        }
        position = sum_of(position, size);
        unindexed = sum_of(unindexed, size);
    }
    result = Py_BuildValue("((LLLLL)NLOOOO)", position, end_offset, unindexed, max_time, max_time_offset,
                           PyBool_FromLong(has_gaps), (long long)last_begin, columns[0], columns[1], columns[2],
                           columns[3]);
done:
    for (int i = 0; i < 4; i++)
        Py_XDECREF(columns[i]);
    PyBuffer_Release(&view);
    return result;
}

/* Set the first offset of a leader epoch. Return -1 after an exception. */
static int
note_leader_epoch(PyObject *leader_epochs, int32_t epoch, int64_t offset)
{
    PyObject *key = PyLong_FromLong(epoch), *value = PyLong_FromLongLong(offset);
    PyObject *found = key == NULL || value == NULL ? NULL : PyDict_SetDefault(leader_epochs, key, value);
    Py_XDECREF(key);
    Py_XDECREF(value);
    return found == NULL ? -1 : 0;
}

/* Append (number, position) to the list of a producer id. Return -1 after an exception. */
static int
add_batch(PyObject *batches, int64_t producer_id, Py_ssize_t number, int64_t position)
{
    PyObject *key = PyLong_FromLongLong(producer_id);
    if (key == NULL)
        return -1;
    PyObject *list = PyDict_GetItemWithError(batches, key); /* borrowed */
    if (list == NULL && !PyErr_Occurred() && (list = PyList_New(0)) != NULL) {
        int result = PyDict_SetItem(batches, key, list);
        Py_DECREF(list);
        if (result < 0)
            list = NULL;
    }
    Py_DECREF(key);
    PyObject *batch = list == NULL ? NULL : Py_BuildValue("(nL)", number, (long long)position);
    if (batch == NULL)
        return -1;
    int result = PyList_Append(list, batch);
    Py_DECREF(batch);
    return result;
}

PyDoc_STRVAR(headers_to_replay_doc,
             "headers_to_replay(headers, position, start, end)\n--\n\n"
             "Return the fields of `ReplayedHeaders` for the batches whose last offset is at least `start` and below\n"
             "`end`. The first batch is at `position`.");

static PyObject *
headers_to_replay(PyObject *module, PyObject *args)
{
    Py_buffer view;
    long long position, start, end;
    if (!PyArg_ParseTuple(args, "y*LLL:headers_to_replay", &view, &position, &start, &end))
        return NULL;
    PyObject *result = NULL, *leader_epochs = PyDict_New(), *batches = PyDict_New();
    if (leader_epochs == NULL || batches == NULL)
        goto done;
    const unsigned char *header = view.buf;
    Py_ssize_t total = view.len / HEADER_BYTES;
    int has_transactions = 0, is_first = 1;
    int32_t noted_epoch = 0;
    for (Py_ssize_t number = 0; number < total; number++, header += HEADER_BYTES) {
        int64_t last_offset, producer_id = i64_at(header + PRODUCER_ID);
        if (find_last_offset(header, &last_offset) && last_offset >= start && last_offset < end) {
            int32_t epoch = i32_at(header + LEADER_EPOCH);
            if ((is_first || epoch != noted_epoch) && note_leader_epoch(leader_epochs, epoch, i64_at(header)) < 0)
                goto done;
            is_first = 0;
            noted_epoch = epoch;
            has_transactions |= (header[ATTRIBUTES + 1] & (TRANSACTIONAL_BIT | CONTROL_BIT)) != 0;
            /* The highest bit of the epoch is its sign. */
            int has_producer = producer_id >= 0 && !(header[PRODUCER_EPOCH] & 0x80);
            if (has_producer && !has_transactions && add_batch(batches, producer_id, number, position) < 0)
                goto done;
        }
        position = sum_of(position, size_of(header));
    }
    if (has_transactions)
        PyDict_Clear(batches);
    result = Py_BuildValue("(ONO)", leader_epochs, PyBool_FromLong(has_transactions), batches);
done:
    Py_XDECREF(leader_epochs);
    Py_XDECREF(batches);
    PyBuffer_Release(&view);
    return result;
}

static PyMethodDef methods[] = {
    {"count_plausible", count_plausible, METH_VARARGS, count_plausible_doc},
    {"find_headers", find_headers, METH_VARARGS, find_headers_doc},
    {"headers_to_replay", headers_to_replay, METH_VARARGS, headers_to_replay_doc},
    {"index_headers", index_headers, METH_VARARGS, index_headers_doc},
    {"whole_batches", whole_batches, METH_VARARGS, whole_batches_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "oncelog.log._scan", "Loops over the batches of a log file.", 0,
    methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC
PyInit__scan(void)
{
    return PyModuleDef_Init(&definition);
}
