/* The row loops of oncelog/wire/records.py: encode the records of a batch, and parse them.

   records.py is the oracle. A function returns None for every input that it does not handle: malformed
   records, numbers above 64 bits, names that are not UTF-8, arguments of other types. The caller then runs the
   Python function, which decides and raises. So no error text stands here twice, and what this file accepts
   must give the same result as records.py.

   Nothing is read outside the buffer, and no memory is allocated by a number in the data: a list grows with
   the records that were found, and a count of headers is checked against the bytes that are left.

   Guard: tests/wire/test_wire_row_loops.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_record.h"

/* Set *delta to the number at `index` of the list of offset deltas, or to `index` without a list. Return 0 if
   the number is not an int of at most 64 bits. */
static int
delta_at(PyObject *deltas, Py_ssize_t index, int64_t *delta)
{
    *delta = index;
    if (deltas == Py_None)
        return 1;
    PyObject *item = PyList_GET_ITEM(deltas, index);
    int overflow;
    if (!PyLong_Check(item))
        return 0;
    *delta = PyLong_AsLongLongAndOverflow(item, &overflow);
    return !overflow;
}

PyDoc_STRVAR(encode_doc,
"encode(records, base_timestamp_ms, offset_deltas, reserve_bytes)\n--\n\n"
"Return a bytearray of `reserve_bytes` zeros and the encoded records, or None if records.py must decide.");

static PyObject *
encode(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    if (arg_count != 4) {
        PyErr_SetString(PyExc_TypeError, "encode takes 4 arguments");
        return NULL;
    }
    PyObject *records = args[0], *deltas = args[2];
    int overflow = 0;
    int64_t base = PyLong_Check(args[1]) ? PyLong_AsLongLongAndOverflow(args[1], &overflow) : 0;
    Py_ssize_t reserve = PyLong_AsSsize_t(args[3]);
    if (reserve < 0) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "reserve_bytes is negative");
        return NULL;
    }
    if (!PyLong_Check(args[1]) || overflow || !(PyList_Check(records) || PyTuple_Check(records))
        || (deltas != Py_None && !PyList_Check(deltas)))
        Py_RETURN_NONE;
    /* No Python code runs between the two loops, so the records and lists cannot change. */
    Py_ssize_t count = PySequence_Fast_GET_SIZE(records);
    if (deltas != Py_None && PyList_GET_SIZE(deltas) < count)
        count = PyList_GET_SIZE(deltas);
    PyObject **items = PySequence_Fast_ITEMS(records);
    Py_ssize_t size = reserve;
    Row row = {0};
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t time_delta, delta;
        if (!view_row(items[i], &row) || !delta_at(deltas, i, &delta)
            || __builtin_sub_overflow(row.timestamp, base, &time_delta))
            Py_RETURN_NONE;
        Py_ssize_t body = body_size(&row, time_delta, delta);
        if (__builtin_add_overflow(size, varint_size(body) + body, &size))
            return PyErr_NoMemory();
    }
    PyObject *result = PyByteArray_FromStringAndSize(NULL, size);
    if (result == NULL)
        return NULL;
    char *out = PyByteArray_AS_STRING(result);
    memset(out, 0, reserve);
    out += reserve;
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t delta = 0;
        (void)view_row(items[i], &row); /* the first loop has checked both calls */
        (void)delta_at(deltas, i, &delta);
        out = put_row(out, &row, row.timestamp - base, delta);
    }
    return result;
}

/* Parsing */

/* Take a length and that many bytes, none of them from `stop` on. Return a new reference to the bytes, or to
   None for a null field. Return NULL without an exception if records.py must decide. */
static inline PyObject *
take_bytes(const unsigned char **position, const unsigned char *stop)
{
    int64_t size;
    if (!take_varint(position, stop, &size))
        return NULL;
    if (size == -1)
        return Py_NewRef(Py_None);
    if (size < 0 || size > stop - *position)
        return NULL;
    PyObject *data = PyBytes_FromStringAndSize((const char *)*position, (Py_ssize_t)size);
    *position += size;
    return data;
}

static PyObject *
take_header(const unsigned char **position, const unsigned char *stop, const char *name_errors)
{
    int64_t size;
    if (!take_varint(position, stop, &size) || size < 0 || size > stop - *position)
        return NULL;
    PyObject *name = PyUnicode_DecodeUTF8((const char *)*position, (Py_ssize_t)size, name_errors);
    if (name == NULL)
        return NULL;
    *position += size;
    PyObject *value = take_bytes(position, stop);
    PyObject *header = value == NULL ? NULL : PyTuple_New(2);
    if (header == NULL) {
        Py_DECREF(name);
        Py_XDECREF(value);
        return NULL;
    }
    PyTuple_SET_ITEM(header, 0, name);
    PyTuple_SET_ITEM(header, 1, value);
    PyObject_GC_UnTrack(header); /* see take_record */
    return header;
}

static PyObject *
take_headers(const unsigned char **position, const unsigned char *stop, const char *name_errors, PyObject *empty)
{
    int64_t count;
    if (!take_varint(position, stop, &count) || count < 0 || count > (stop - *position) / 2)
        return NULL;
    if (count == 0)
        return Py_NewRef(empty);
    PyObject *headers = PyTuple_New((Py_ssize_t)count);
    for (Py_ssize_t i = 0; headers != NULL && i < count; i++) {
        PyObject *header = take_header(position, stop, name_errors);
        if (header == NULL) {
            Py_CLEAR(headers);
            break;
        }
        PyTuple_SET_ITEM(headers, i, header);
    }
    if (headers != NULL)
        PyObject_GC_UnTrack(headers); /* see take_record */
    return headers;
}

typedef struct {
    int64_t base_offset, base_timestamp;
    PyObject *fixed_time;          /* with LogAppendTime; else NULL */
    PyObject *last_time;           /* the int object of the previous timestamp: often the next one is equal */
    int64_t last_timestamp;
    PyTypeObject *type;            /* DecodedRecord */
    const char *name_errors;
    PyObject *empty;               /* the empty tuple */
} Parse;

static PyObject *
time_object(Parse *parse, int64_t timestamp)
{
    if (parse->fixed_time != NULL)
        return Py_NewRef(parse->fixed_time);
    if (parse->last_time == NULL || parse->last_timestamp != timestamp) {
        Py_XSETREF(parse->last_time, PyLong_FromLongLong(timestamp));
        parse->last_timestamp = timestamp;
    }
    return Py_XNewRef(parse->last_time);
}

/* Take one record. Return NULL, with or without an exception, if records.py must decide. */
static PyObject *
take_record(Parse *parse, const unsigned char **position, const unsigned char *end)
{
    int64_t size, time_delta, delta, offset, timestamp;
    if (!take_varint(position, end, &size) || size < 1 || size > end - *position)
        return NULL;
    const unsigned char *stop = *position + size;
    ++*position; /* attributes, which are unused */
    if (!take_varint(position, stop, &time_delta) || !take_varint(position, stop, &delta)
        || __builtin_add_overflow(parse->base_offset, delta, &offset)
        || __builtin_add_overflow(parse->base_timestamp, time_delta, &timestamp))
        return NULL;
    PyObject *fields[5] = {NULL};
    int is_whole = (fields[2] = take_bytes(position, stop)) != NULL
        && (fields[3] = take_bytes(position, stop)) != NULL
        && (fields[4] = take_headers(position, stop, parse->name_errors, parse->empty)) != NULL
        && *position == stop
        && (fields[0] = PyLong_FromLongLong(offset)) != NULL
        && (fields[1] = time_object(parse, timestamp)) != NULL;
    PyObject *record = is_whole ? parse->type->tp_alloc(parse->type, 5) : NULL;
    if (record == NULL) {
        for (int i = 0; i < 5; i++)
            Py_XDECREF(fields[i]);
        return NULL;
    }
    for (int i = 0; i < 5; i++)
        PyTuple_SET_ITEM(record, i, fields[i]);
    /* A record refers to numbers, bytes, text and tuples of these, so it is in no reference cycle. The
       garbage collector need not visit it. */
    PyObject_GC_UnTrack(record);
    return record;
}

static PyObject *
take_records(Parse *parse, const unsigned char *start, Py_ssize_t first, Py_ssize_t size, Py_ssize_t count)
{
    const unsigned char *position = start + first, *end = start + size;
    PyObject *records = PyList_New(0);
    if (records == NULL)
        return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *record = take_record(parse, &position, end);
        if (record == NULL || PyList_Append(records, record) < 0) {
            Py_XDECREF(record);
            Py_DECREF(records);
            return NULL;
        }
        Py_DECREF(record);
    }
    return Py_BuildValue("(Nn)", records, (Py_ssize_t)(position - start));
}

PyDoc_STRVAR(parse_doc,
"parse(data, position, count, base_offset, base_timestamp_ms, fixed_time_ms, record_type, name_errors)\n--\n\n"
"Return the list of `count` records from `position` on, and the position after them.\n"
"Return None if records.py must decide.");

static PyObject *
parse(PyObject *module, PyObject *args)
{
    Py_buffer data;
    Py_ssize_t position, count;
    long long base_offset, base_timestamp;
    PyObject *fixed_time, *type;
    const char *name_errors;
    if (!PyArg_ParseTuple(args, "y*nnLLOOs:parse", &data, &position, &count, &base_offset, &base_timestamp,
                          &fixed_time, &type, &name_errors))
        return NULL;
    PyObject *result = NULL;
    if (!PyType_Check(type) || !PyType_IsSubtype((PyTypeObject *)type, &PyTuple_Type)
        || ((PyTypeObject *)type)->tp_basicsize != PyTuple_Type.tp_basicsize)
        PyErr_SetString(PyExc_TypeError, "record_type must be a NamedTuple");
    else if (position < 0 || position > data.len)
        PyErr_SetString(PyExc_ValueError, "position is outside the data");
    else {
        Parse state = {base_offset, base_timestamp, fixed_time == Py_None ? NULL : fixed_time, NULL, 0,
                       (PyTypeObject *)type, name_errors, PyTuple_New(0)};
        if (state.empty != NULL)
            result = take_records(&state, data.buf, position, data.len, count);
        Py_XDECREF(state.last_time);
        Py_XDECREF(state.empty);
        /* Raise only MemoryError here. For any other error, records.py must decide. */
        if (result == NULL && !(PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_MemoryError))) {
            PyErr_Clear();
            result = Py_NewRef(Py_None);
        }
    }
    PyBuffer_Release(&data);
    return result;
}

static PyMethodDef methods[] = {
    {"encode", (PyCFunction)(void (*)(void))encode, METH_FASTCALL, encode_doc},
    {"parse", parse, METH_VARARGS, parse_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "oncelog.wire._records", "The row loops of oncelog.wire.records.", 0, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC
PyInit__records(void)
{
    return PyModuleDef_Init(&definition);
}
