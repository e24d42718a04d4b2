/* Appends records to batches, in C: oncelog/client/producer/appender.py is the oracle.

   While `Appender.send` holds the producer's lock, it does not release the GIL: it calls no Python code and creates
   no object that the garbage collector tracks. So no signal handler or other thread runs before the append is
   complete. A record is encoded when it is appended. For a row that needs a check or a new batch, a function
   returns None, and the caller takes the slow path.

   Guard: tests/client/test_client_appender.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <time.h>

#include "../../wire/_record.h"
#include "_murmur2.h"

#define RECORD_OVERHEAD_BYTES 21 /* rows.py */
#define FIRST_CAPACITY 1024

/* RecordBuffer: the records of a batch, encoded */

typedef struct {
    PyObject_HEAD
    PyObject *result;     /* BatchResult; NULL once the records were taken */
    PyObject *callbacks;  /* the result's dict of callbacks */
    PyObject *data;       /* a bytearray, `used` bytes of which are written; NULL once the records were taken */
    Py_ssize_t space, used, size_bytes, count, times_capacity;
    int64_t *times, max_time;
    uint64_t call;        /* number of the last `append_many` call that used this buffer */
    Py_ssize_t part;      /* index of this buffer's part in that call */
} RecordBuffer;

static PyTypeObject RecordBufferType;

static int
buffer_init(RecordBuffer *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"result", "callbacks", "space_bytes", NULL};
    PyObject *result, *callbacks;
    Py_ssize_t space;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO!n", names, &result, &PyDict_Type, &callbacks, &space))
        return -1;
    if (space < 0 || self->result != NULL) {
        PyErr_SetString(PyExc_ValueError, "space_bytes is negative, or the buffer is in use");
        return -1;
    }
    self->data = PyByteArray_FromStringAndSize(NULL, space + FIRST_CAPACITY);
    if (self->data == NULL)
        return -1;
    memset(PyByteArray_AS_STRING(self->data), 0, space);
    self->result = Py_NewRef(result);
    self->callbacks = Py_NewRef(callbacks);
    self->space = self->used = self->size_bytes = space;
    return 0;
}

static int
buffer_traverse(RecordBuffer *self, visitproc visit, void *arg)
{
    Py_VISIT(self->result);
    Py_VISIT(self->callbacks);
    return 0;
}

static int
buffer_clear(RecordBuffer *self)
{
    Py_CLEAR(self->result);
    Py_CLEAR(self->callbacks);
    Py_CLEAR(self->data);
    return 0;
}

static void
buffer_dealloc(RecordBuffer *self)
{
    PyObject_GC_UnTrack(self);
    buffer_clear(self);
    PyMem_Free(self->times);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Make room for `size` more bytes and one more time. */
static int
buffer_reserve(RecordBuffer *self, Py_ssize_t size)
{
    Py_ssize_t capacity = PyByteArray_GET_SIZE(self->data), needed;
    if (__builtin_add_overflow(self->used, size, &needed)) {
        PyErr_NoMemory();
        return -1;
    }
    if (needed > capacity) {
        /* Grow fourfold, because each resize copies the batch. `take` frees memory if more than half is unused. */
        if (capacity <= PY_SSIZE_T_MAX / 4 && needed < capacity * 4)
            needed = capacity * 4;
        if (PyByteArray_Resize(self->data, needed) < 0)
            return -1;
    }
    if (self->count == self->times_capacity) {
        Py_ssize_t more = self->times_capacity ? self->times_capacity * 2 : 16;
        int64_t *times = PyMem_Realloc(self->times, more * sizeof(int64_t));
        if (times == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        self->times = times;
        self->times_capacity = more;
    }
    return 0;
}

/* Append a row, and return its index, or -1 with an exception and without a change. */
static Py_ssize_t
buffer_append(RecordBuffer *self, const Row *row, Py_ssize_t size_bytes, PyObject *callback)
{
    if (self->data == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the records of this batch were taken");
        return -1;
    }
    int64_t delta;
    Py_ssize_t index = self->count;
    if (__builtin_sub_overflow(row->timestamp, index ? self->times[0] : row->timestamp, &delta)) {
        PyErr_SetString(PyExc_OverflowError, "two timestamps differ by more than 64 bits");
        return -1;
    }
    Py_ssize_t body = body_size(row, delta, index);
    if (buffer_reserve(self, varint_size(body) + body) < 0)
        return -1;
    if (callback != Py_None) {
        PyObject *number = PyLong_FromSsize_t(index);
        /* No entry is replaced: the destructor of an old callback could run any code here, which could even free
           this buffer. See test_no_destructor_runs_within_an_append. */
        int failed = number == NULL || PyDict_SetDefault(self->callbacks, number, callback) == NULL;
        Py_XDECREF(number);
        if (failed)
            return -1;
    }
    char *start = PyByteArray_AS_STRING(self->data);
    self->used = put_row(start + self->used, row, delta, index) - start;
    self->times[index] = row->timestamp;
    if (!index || row->timestamp > self->max_time)
        self->max_time = row->timestamp;
    self->size_bytes += size_bytes;
    self->count++;
    return index;
}

static PyObject *
buffer_append_row(RecordBuffer *self, PyObject *args)
{
    PyObject *record, *callback;
    Py_ssize_t size_bytes;
    Row row = {0};
    if (!PyArg_ParseTuple(args, "OnO:append", &record, &size_bytes, &callback))
        return NULL;
    if (!view_row(record, &row)) {
        PyErr_SetString(PyExc_TypeError, "a row must be a tuple of timestamp, key, value and headers");
        return NULL;
    }
    Py_ssize_t index = buffer_append(self, &row, size_bytes, callback);
    return index < 0 ? NULL : PyLong_FromSsize_t(index);
}

static PyObject *
buffer_take(RecordBuffer *self, PyObject *unused)
{
    if (self->data == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the records of this batch were taken");
        return NULL;
    }
    if (PyByteArray_Resize(self->data, self->used) < 0)
        return NULL;
    PyObject *data = self->data;
    self->data = NULL;
    buffer_clear(self); /* avoid a cycle: the result refers to this object, which has the timestamps */
    return data;
}

static PyObject *
buffer_copy(RecordBuffer *self, PyObject *unused)
{
    if (self->data == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the records of this batch were taken");
        return NULL;
    }
    return PyByteArray_FromStringAndSize(PyByteArray_AS_STRING(self->data), self->used);
}

static PyObject *
buffer_times(RecordBuffer *self, PyObject *unused)
{
    return Py_NewRef(self);
}

static Py_ssize_t
buffer_length(RecordBuffer *self)
{
    return self->count;
}

static PyObject *
buffer_item(RecordBuffer *self, Py_ssize_t index)
{
    if (index < 0 || index >= self->count) {
        PyErr_SetString(PyExc_IndexError, "the batch has no such record");
        return NULL;
    }
    return PyLong_FromLongLong(self->times[index]);
}

static PyObject *
buffer_base_time(RecordBuffer *self, void *unused)
{
    return PyLong_FromLongLong(self->count ? self->times[0] : -1);
}

static PyObject *
buffer_max_time(RecordBuffer *self, void *unused)
{
    return PyLong_FromLongLong(self->count ? self->max_time : -1);
}

static PyMethodDef buffer_methods[] = {
    {"append", (PyCFunction)buffer_append_row, METH_VARARGS, NULL},
    {"take", (PyCFunction)buffer_take, METH_NOARGS, NULL},
    {"copy", (PyCFunction)buffer_copy, METH_NOARGS, NULL},
    {"times", (PyCFunction)buffer_times, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef buffer_members[] = {
    {"result", T_OBJECT, offsetof(RecordBuffer, result), READONLY, NULL},
    {"count", T_PYSSIZET, offsetof(RecordBuffer, count), READONLY, NULL},
    {"size_bytes", T_PYSSIZET, offsetof(RecordBuffer, size_bytes), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef buffer_properties[] = {
    {"base_timestamp_ms", (getter)buffer_base_time, NULL, NULL, NULL},
    {"max_timestamp_ms", (getter)buffer_max_time, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PySequenceMethods buffer_sequence = {
    .sq_length = (lenfunc)buffer_length,
    .sq_item = (ssizeargfunc)buffer_item,
};

static PyTypeObject RecordBufferType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "oncelog.client.producer._appender.RecordBuffer",
    .tp_doc = "The records of a batch, encoded.",
    .tp_basicsize = sizeof(RecordBuffer),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)buffer_init,
    .tp_dealloc = (destructor)buffer_dealloc,
    .tp_traverse = (traverseproc)buffer_traverse,
    .tp_clear = (inquiry)buffer_clear,
    .tp_methods = buffer_methods,
    .tp_members = buffer_members,
    .tp_getset = buffer_properties,
    .tp_as_sequence = &buffer_sequence,
};

/* OpenBatches: the open batch of each partition of a topic */

typedef struct {
    PyObject_HEAD
    PyObject *buffers;    /* list: partition -> RecordBuffer or None */
    Py_ssize_t count;     /* partitions that exist */
    Py_ssize_t sticky;    /* partition of records without a key; -1 for none */
    Py_ssize_t max_batch_bytes;
    char hashes_keys;     /* 1: murmur2 chooses the partition of a key */
} OpenBatches;

static PyTypeObject OpenBatchesType;

static int
open_init(OpenBatches *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"hashes_keys", "max_batch_bytes", NULL};
    int hashes_keys;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "pn", names, &hashes_keys, &self->max_batch_bytes))
        return -1;
    PyObject *buffers = PyList_New(0);
    if (buffers == NULL)
        return -1;
    Py_XSETREF(self->buffers, buffers);
    self->count = 0;
    self->sticky = -1;
    self->hashes_keys = (char)hashes_keys;
    return 0;
}

static int
open_traverse(OpenBatches *self, visitproc visit, void *arg)
{
    Py_VISIT(self->buffers);
    return 0;
}

static int
open_clear(OpenBatches *self)
{
    Py_CLEAR(self->buffers);
    return 0;
}

static void
open_dealloc(OpenBatches *self)
{
    PyObject_GC_UnTrack(self);
    open_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Return the buffer for a record (borrowed), or NULL without an exception if there is none. */
static RecordBuffer *
open_choose(OpenBatches *self, PyObject *partition, const char *key, Py_ssize_t key_size)
{
    Py_ssize_t number;
    if (partition != Py_None) {
        if (!PyLong_CheckExact(partition))
            return NULL;
        int overflow;
        number = PyLong_AsLongAndOverflow(partition, &overflow);
        if (overflow)
            return NULL;
    }
    else if (key_size < 0)
        number = self->sticky;
    else if (key_size > 0 && self->hashes_keys && self->count > 0)
        number = (murmur2_of((const unsigned char *)key, key_size) & 0x7FFFFFFF) % self->count;
    else
        return NULL;
    if (number < 0 || number >= self->count || self->buffers == NULL || number >= PyList_GET_SIZE(self->buffers))
        return NULL;
    PyObject *buffer = PyList_GET_ITEM(self->buffers, number);
    return Py_TYPE(buffer) == &RecordBufferType ? (RecordBuffer *)buffer : NULL;
}

static PyMemberDef open_members[] = {
    {"buffers", T_OBJECT, offsetof(OpenBatches, buffers), READONLY, NULL},
    {"count", T_PYSSIZET, offsetof(OpenBatches, count), 0, NULL},
    {"sticky", T_PYSSIZET, offsetof(OpenBatches, sticky), 0, NULL},
    {"max_batch_bytes", T_PYSSIZET, offsetof(OpenBatches, max_batch_bytes), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject OpenBatchesType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "oncelog.client.producer._appender.OpenBatches",
    .tp_doc = "The open batch of each partition of a topic.",
    .tp_basicsize = sizeof(OpenBatches),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)open_init,
    .tp_dealloc = (destructor)open_dealloc,
    .tp_traverse = (traverseproc)open_traverse,
    .tp_clear = (inquiry)open_clear,
    .tp_members = open_members,
};

/* Appender: appends to open batches */

typedef struct {
    PyObject_HEAD
    PyObject *topics;       /* dict: topic -> OpenBatches */
    PyObject *lock;         /* the producer's lock, or None */
    PyObject *wall_ns;      /* the clock, or None for the system's */
    PyTypeObject *future_type;
    Py_ssize_t result_slot, index_slot; /* offsets of the future's two attributes */
    Py_ssize_t buffered_bytes, buffer_bytes;
    char is_changing;
    uint64_t call_count;
} Appender;

static PyObject *name_acquire, *name_release;

static int
appender_init(Appender *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"buffer_bytes", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "n", names, &self->buffer_bytes))
        return -1;
    PyObject *topics = PyDict_New();
    if (topics == NULL)
        return -1;
    Py_XSETREF(self->topics, topics);
    Py_XSETREF(self->lock, Py_NewRef(Py_None));
    Py_XSETREF(self->wall_ns, Py_NewRef(Py_None));
    return 0;
}

static int
appender_traverse(Appender *self, visitproc visit, void *arg)
{
    Py_VISIT(self->topics);
    Py_VISIT(self->lock);
    Py_VISIT(self->wall_ns);
    Py_VISIT(self->future_type);
    return 0;
}

static int
appender_clear(Appender *self)
{
    Py_CLEAR(self->topics);
    Py_CLEAR(self->lock);
    Py_CLEAR(self->wall_ns);
    Py_CLEAR(self->future_type);
    return 0;
}

static void
appender_dealloc(Appender *self)
{
    PyObject_GC_UnTrack(self);
    appender_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Return the offset of a __slots__ attribute in its object, or -1 with an exception. */
static Py_ssize_t
slot_of(PyObject *type, const char *name)
{
    Py_ssize_t place = -1;
    PyObject *interned = PyUnicode_InternFromString(name); /* interned, for the type's attribute cache */
    PyObject *descriptor = interned == NULL ? NULL : PyObject_GetAttr(type, interned);
    Py_XDECREF(interned);
    if (descriptor != NULL && Py_TYPE(descriptor) == &PyMemberDescr_Type
        && ((PyMemberDescrObject *)descriptor)->d_member->type == T_OBJECT_EX)
        place = ((PyMemberDescrObject *)descriptor)->d_member->offset;
    else if (!PyErr_Occurred())
        PyErr_Format(PyExc_TypeError, "the future has no slot %s", name);
    Py_XDECREF(descriptor);
    return place;
}

PyDoc_STRVAR(prepare_doc,
"prepare(lock, wall_ns, future_type, *, is_system_clock=False)\n--\n\n"
"Set the producer's lock, the clock and the type of futures, for `send`. With is_system_clock, `send` reads the\n"
"system's clock instead of calling wall_ns.");

static PyObject *
appender_prepare(Appender *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"lock", "wall_ns", "future_type", "is_system_clock", NULL};
    PyObject *lock, *wall_ns, *type;
    int is_system_clock = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOO!|$p:prepare", names, &lock, &wall_ns, &PyType_Type, &type,
                                     &is_system_clock))
        return NULL;
    if (is_system_clock)
        wall_ns = Py_None;
    Py_ssize_t result_slot = slot_of(type, "_batch_result");
    Py_ssize_t index_slot = result_slot < 0 ? -1 : slot_of(type, "_index");
    if (index_slot < 0)
        return NULL;
    self->result_slot = result_slot;
    self->index_slot = index_slot;
    Py_XSETREF(self->lock, Py_NewRef(lock));
    Py_XSETREF(self->wall_ns, Py_NewRef(wall_ns));
    Py_XSETREF(self->future_type, (PyTypeObject *)Py_NewRef(type));
    Py_RETURN_NONE;
}

static int
now_of(Appender *self, int64_t *now_ms)
{
    if (self->wall_ns == Py_None) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        *now_ms = (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
        return 0;
    }
    PyObject *nanoseconds = PyObject_CallNoArgs(self->wall_ns);
    if (nanoseconds == NULL)
        return -1;
    *now_ms = PyLong_AsLongLong(nanoseconds) / 1000000;
    Py_DECREF(nanoseconds);
    return PyErr_Occurred() ? -1 : 0;
}

/* Append to an open batch with room. Return the buffer (borrowed) and the row's index, or NULL without an
   exception if the row needs the slow path. The caller holds the producer's lock. */
static RecordBuffer *
append_open(Appender *self, PyObject *topic, PyObject *partition, const Row *row, Py_ssize_t size_bytes,
            PyObject *callback, Py_ssize_t *index)
{
    if (self->is_changing || self->topics == NULL)
        return NULL;
    PyObject *open = PyDict_GetItemWithError(self->topics, topic);
    if (open == NULL || Py_TYPE(open) != &OpenBatchesType)
        return NULL;
    RecordBuffer *buffer = open_choose((OpenBatches *)open, partition, row->key, row->key_size);
    if (buffer == NULL || size_bytes > ((OpenBatches *)open)->max_batch_bytes - buffer->size_bytes
        || size_bytes > self->buffer_bytes - self->buffered_bytes)
        return NULL;
    *index = buffer_append(buffer, row, size_bytes, callback);
    if (*index < 0)
        return NULL;
    self->buffered_bytes += size_bytes;
    return buffer;
}

PyDoc_STRVAR(append_doc,
"append(topic, partition, row, size_bytes, callback)\n--\n\n"
"Append a row to an open batch with room. Return (result, index), or None if the row needs the slow path.\n"
"The caller holds the producer's lock.");

static PyObject *
appender_append(Appender *self, PyObject *const *args, Py_ssize_t arg_count)
{
    if (arg_count != 5) {
        PyErr_SetString(PyExc_TypeError, "append takes 5 arguments");
        return NULL;
    }
    Py_ssize_t size_bytes = PyLong_AsSsize_t(args[3]), index;
    if (size_bytes < 0 && PyErr_Occurred())
        return NULL;
    Row row = {0};
    if (!PyUnicode_CheckExact(args[0]) || !view_row(args[2], &row))
        Py_RETURN_NONE;
    RecordBuffer *buffer = append_open(self, args[0], args[1], &row, size_bytes, args[4], &index);
    if (buffer == NULL) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(On)", buffer->result, index);
}

PyDoc_STRVAR(send_doc,
"send(topic, value, key, partition, timestamp_ms, headers, callback)\n--\n\n"
"Append a record of an application, and return its future, or None if the record needs the slow path.");

static PyObject *
appender_send(Appender *self, PyObject *const *args, Py_ssize_t arg_count)
{
    if (arg_count != 7 || self->future_type == NULL) {
        PyErr_SetString(PyExc_TypeError, "send takes 7 arguments, after prepare");
        return NULL;
    }
    Row row = {.headers = args[5], .headers_size = 1};
    if (!PyUnicode_CheckExact(args[0]) || !view_bytes(args[1], &row.value, &row.value_size)
        || !view_bytes(args[2], &row.key, &row.key_size) || args[4] != Py_None || !PyTuple_CheckExact(args[5]) || PyTuple_GET_SIZE(args[5]) != 0)
        Py_RETURN_NONE;
    Py_ssize_t size_bytes = RECORD_OVERHEAD_BYTES + (row.value_size > 0 ? row.value_size : 0)
        + (row.key_size > 0 ? row.key_size : 0);
    Py_ssize_t index = 0;
    if (now_of(self, &row.timestamp) < 0)
        return NULL;
    /* Create the future before taking the lock: its allocation may start the garbage collector, which may run
       any finalizer. */
    PyObject *future = self->future_type->tp_alloc(self->future_type, 0);
    if (future == NULL)
        return NULL;
    PyObject *lock = Py_NewRef(self->lock); /* a forked child replaces self->lock */
    PyObject *taken = PyObject_CallMethodNoArgs(lock, name_acquire);
    if (taken == NULL) {
        Py_DECREF(lock);
        Py_DECREF(future);
        return NULL;
    }
    RecordBuffer *buffer = append_open(self, args[0], args[3], &row, size_bytes, args[6], &index);
    if (buffer != NULL) {
        PyObject *number = PyLong_FromSsize_t(index); /* fails only without memory */
        *(PyObject **)((char *)future + self->result_slot) = Py_NewRef(buffer->result);
        *(PyObject **)((char *)future + self->index_slot) = number;
    }
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyObject *released = PyObject_CallMethodNoArgs(lock, name_release);
    if (type != NULL)
        PyErr_Restore(type, error, trace);
    Py_XDECREF(released);
    Py_DECREF(taken);
    Py_DECREF(lock);
    if (PyErr_Occurred()) {
        Py_DECREF(future);
        return NULL;
    }
    if (buffer == NULL) {
        Py_DECREF(future);
        Py_RETURN_NONE;
    }
    return future;
}

/* Part: consecutive records of one buffer that a call of `append_many` appended */

typedef struct {
    RecordBuffer *buffer; /* owned */
    Py_ssize_t first, count;
} Part;

static int
add_parts(PyObject *found, const Part *parts, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *part = Py_BuildValue("(Onn)", parts[i].buffer->result, parts[i].first, parts[i].count);
        int failed = part == NULL || PyList_Append(found, part) < 0;
        Py_XDECREF(part);
        if (failed)
            return -1;
    }
    return 0;
}

#define MAX_PARTS 256

PyDoc_STRVAR(append_many_doc,
"append_many(topic, partition, values, keys, timestamps_ms, headers, first, last, parts)\n--\n\n"
"Append the rows from number `first` to `last` - 1 to open batches, until one needs the slow path.\n"
"Return the number of the first row that was not appended. Add (result, index of the first record, record count)\n"
"to `parts` for each batch. `keys` is a list, a tuple or None; `timestamps_ms` is a list or one number.\n"
"The caller holds the lock.");

static PyObject *
appender_append_many(Appender *self, PyObject *args)
{
    PyObject *topic, *partition, *values, *keys, *times, *headers, *found;
    Py_ssize_t next, last, count = 0;
    if (!PyArg_ParseTuple(args, "OOOOOO!nnO!:append_many", &topic, &partition, &values, &keys, &times, &PyTuple_Type,
                          &headers, &next, &last, &PyList_Type, &found))
        return NULL;
    PyObject *example = Py_BuildValue("(iOOO)", 0, Py_None, Py_None, headers);
    Row row = {0};
    int is_usual = example != NULL && PyUnicode_CheckExact(topic) && view_row(example, &row)
        && (PyList_CheckExact(values) || PyTuple_CheckExact(values))
        && (keys == Py_None || PyList_CheckExact(keys) || PyTuple_CheckExact(keys))
        && (PyLong_CheckExact(times) || PyList_CheckExact(times)) && next >= 0;
    Py_XDECREF(example); /* `row` borrows `headers` from the caller */
    if (PyErr_Occurred())
        return NULL;
    Py_ssize_t fixed_bytes = RECORD_OVERHEAD_BYTES;
    for (Py_ssize_t i = 0; is_usual && i < PyTuple_GET_SIZE(headers); i++) {
        /* the same sum as in row_size_bytes of rows.py */
        PyObject *header = PyTuple_GET_ITEM(headers, i), *data = PyTuple_GET_ITEM(header, 1);
        fixed_bytes += 10 + 4 * PyUnicode_GET_LENGTH(PyTuple_GET_ITEM(header, 0))
            + (data == Py_None ? 0 : PyBytes_GET_SIZE(data));
    }
    Part parts[MAX_PARTS];
    uint64_t call = ++self->call_count;
    for (; is_usual && next < last && next < PySequence_Fast_GET_SIZE(values) && count < MAX_PARTS; next++) {
        PyObject *key = Py_None, *time = times;
        if (keys != Py_None && next < PySequence_Fast_GET_SIZE(keys))
            key = PySequence_Fast_GET_ITEM(keys, next);
        if (PyList_CheckExact(times)) {
            if (next >= PyList_GET_SIZE(times))
                break;
            time = PyList_GET_ITEM(times, next);
        }
        int overflow;
        if (!PyLong_CheckExact(time)
            || !view_bytes(PySequence_Fast_GET_ITEM(values, next), &row.value, &row.value_size)
            || !view_bytes(key, &row.key, &row.key_size))
            break;
        row.timestamp = PyLong_AsLongLongAndOverflow(time, &overflow);
        if (overflow || row.timestamp < 0)
            break;
        Py_ssize_t index, size_bytes = fixed_bytes + (row.value_size > 0 ? row.value_size : 0)
            + (row.key_size > 0 ? row.key_size : 0);
        RecordBuffer *buffer = append_open(self, topic, partition, &row, size_bytes, Py_None, &index);
        if (buffer == NULL)
            break;
        if (buffer->call == call)
            parts[buffer->part].count++;
        else {
            buffer->call = call;
            buffer->part = count;
            parts[count++] = (Part){(RecordBuffer *)Py_NewRef(buffer), index, 1};
        }
    }
    int failed = PyErr_Occurred() != NULL || add_parts(found, parts, count) < 0;
    for (Py_ssize_t i = 0; i < count; i++)
        Py_DECREF(parts[i].buffer);
    return failed ? NULL : PyLong_FromSsize_t(next);
}

static PyMethodDef appender_methods[] = {
    {"prepare", (PyCFunction)(void (*)(void))appender_prepare, METH_VARARGS | METH_KEYWORDS, prepare_doc},
    {"append", (PyCFunction)(void (*)(void))appender_append, METH_FASTCALL, append_doc},
    {"send", (PyCFunction)(void (*)(void))appender_send, METH_FASTCALL, send_doc},
    {"append_many", (PyCFunction)appender_append_many, METH_VARARGS, append_many_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef appender_members[] = {
    {"topics", T_OBJECT, offsetof(Appender, topics), READONLY, NULL},
    {"lock", T_OBJECT, offsetof(Appender, lock), 0, NULL},
    {"buffered_bytes", T_PYSSIZET, offsetof(Appender, buffered_bytes), 0, NULL},
    {"buffer_bytes", T_PYSSIZET, offsetof(Appender, buffer_bytes), 0, NULL},
    {"is_changing", T_BOOL, offsetof(Appender, is_changing), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject AppenderType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "oncelog.client.producer._appender.Appender",
    .tp_doc = "Appends records to the open batches of a producer.",
    .tp_basicsize = sizeof(Appender),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)appender_init,
    .tp_dealloc = (destructor)appender_dealloc,
    .tp_traverse = (traverseproc)appender_traverse,
    .tp_clear = (inquiry)appender_clear,
    .tp_methods = appender_methods,
    .tp_members = appender_members,
};

/* Callbacks */

static int
append_error(PyObject *errors)
{
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL)
        PyException_SetTraceback(error, trace);
    int failed = error == NULL || PyList_Append(errors, error);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    return failed ? -1 : 0;
}

/* Return the metadata of the record at `index`. `base` is -1 if the offset is unknown. */
static PyObject *
metadata_of(PyTypeObject *type, PyObject *topic, PyObject *partition, long long base, Py_ssize_t index,
            PyObject *times)
{
    PyObject *offset = base < 0 ? Py_NewRef(Py_None) : PyLong_FromLongLong(base + index);
    PyObject *time = PyLong_Check(times) ? Py_NewRef(times) : PySequence_GetItem(times, index);
    PyObject *metadata = offset == NULL || time == NULL ? NULL : type->tp_alloc(type, 4);
    if (metadata == NULL) {
        Py_XDECREF(offset);
        Py_XDECREF(time);
        return NULL;
    }
    PyTuple_SET_ITEM(metadata, 0, Py_NewRef(topic));
    PyTuple_SET_ITEM(metadata, 1, Py_NewRef(partition));
    PyTuple_SET_ITEM(metadata, 2, offset);
    PyTuple_SET_ITEM(metadata, 3, time);
    PyObject_GC_UnTrack(metadata); /* strings and ints are in no reference cycle */
    return metadata;
}

PyDoc_STRVAR(call_back_doc,
"call_back(callbacks, metadata_type, topic, partition, base_offset, times, error)\n--\n\n"
"Call the delivery callbacks of a batch in the order of their records, and return the exceptions they raised.\n"
"`callbacks` maps indexes to callables, and must not change during the call.\n"
"`base_offset` None: no offsets are known. `error` None: each callback gets the metadata of its record.");

static PyObject *
call_back(PyObject *module, PyObject *args)
{
    PyObject *callbacks, *type, *topic, *partition, *base_offset, *times, *error, *key, *callback;
    if (!PyArg_ParseTuple(args, "O!O!OOOOO:call_back", &PyDict_Type, &callbacks, &PyType_Type, &type, &topic,
                          &partition, &base_offset, &times, &error))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)type, &PyTuple_Type)
        || ((PyTypeObject *)type)->tp_basicsize != PyTuple_Type.tp_basicsize) {
        PyErr_SetString(PyExc_TypeError, "metadata_type must be a NamedTuple");
        return NULL;
    }
    long long base = base_offset == Py_None ? -1 : PyLong_AsLongLong(base_offset);
    PyObject *errors = base == -1 && PyErr_Occurred() ? NULL : PyList_New(0);
    Py_ssize_t place = 0;
    while (errors != NULL && PyDict_Next(callbacks, &place, &key, &callback)) {
        PyObject *metadata = Py_NewRef(Py_None);
        if (error == Py_None) {
            Py_SETREF(metadata, metadata_of((PyTypeObject *)type, topic, partition, base, PyLong_AsSsize_t(key),
                                            times));
        }
        PyObject *arguments[3] = {NULL, metadata, error};
        PyObject *result = NULL;
        if (metadata != NULL) {
            Py_INCREF(callback);
            result = PyObject_Vectorcall(callback, arguments + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
            Py_DECREF(callback);
        }
        Py_XDECREF(metadata);
        if (result == NULL && append_error(errors) < 0)
            Py_CLEAR(errors);
        Py_XDECREF(result);
    }
    return errors;
}

PyDoc_STRVAR(first_unusual_doc,
"first_unusual(values, keys, max_bytes)\n--\n\n"
"Return the number of the first row that is not bytes or None, or is larger than `max_bytes`, or the number of\n"
"values. `keys` may be shorter than `values`.");

static PyObject *
first_unusual(PyObject *module, PyObject *args)
{
    PyObject *values, *keys;
    Py_ssize_t max_bytes, number = 0;
    if (!PyArg_ParseTuple(args, "OOn:first_unusual", &values, &keys, &max_bytes))
        return NULL;
    if ((PyList_Check(values) || PyTuple_Check(values)) && (PyList_Check(keys) || PyTuple_Check(keys))) {
        for (; number < PySequence_Fast_GET_SIZE(values); number++) {
            const char *data;
            Py_ssize_t size, key_size = -1;
            if (!view_bytes(PySequence_Fast_GET_ITEM(values, number), &data, &size)
                || (number < PySequence_Fast_GET_SIZE(keys)
                    && !view_bytes(PySequence_Fast_GET_ITEM(keys, number), &data, &key_size))
                || (size > 0 ? size : 0) > max_bytes - (key_size > 0 ? key_size : 0))
                break;
        }
    }
    return PyLong_FromSsize_t(number);
}

static PyMethodDef methods[] = {
    {"first_unusual", first_unusual, METH_VARARGS, first_unusual_doc},
    {"call_back", call_back, METH_VARARGS, call_back_doc},
    {NULL, NULL, 0, NULL},
};

static int
execute(PyObject *module)
{
    if (name_acquire == NULL
        && ((name_acquire = PyUnicode_InternFromString("acquire")) == NULL
            || (name_release = PyUnicode_InternFromString("release")) == NULL))
        return -1;
    if (PyModule_AddType(module, &RecordBufferType) < 0 || PyModule_AddType(module, &OpenBatchesType) < 0
        || PyModule_AddType(module, &AppenderType) < 0)
        return -1;
    return 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "oncelog.client.producer._appender", "Appends records to batches.", 0, methods,
    slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC
PyInit__appender(void)
{
    return PyModuleDef_Init(&definition);
}
