/* Numbers, fields and rows of the record format (oncelog/wire/records.py), for the C files of this package. */

#ifndef ONCELOG_RECORD_H
#define ONCELOG_RECORD_H

#include <Python.h>
#include <stdint.h>
#include <string.h>

/* Numbers */

static inline uint64_t
zigzag(int64_t value)
{
    return ((uint64_t)value << 1) ^ (uint64_t)(value >> 63);
}

static inline Py_ssize_t
varint_size(int64_t value)
{
    uint64_t rest = zigzag(value);
    Py_ssize_t size = 1;
    while (rest > 127) {
        rest >>= 7;
        size++;
    }
    return size;
}

static inline char *
put_varint(char *out, int64_t value)
{
    uint64_t rest = zigzag(value);
    while (rest > 127) {
        *out++ = (char)(rest | 128);
        rest >>= 7;
    }
    *out++ = (char)rest;
    return out;
}

/* Read a varint that ends before `end`, and move *position after it. Return 0 if there is none of at most 64
   bits: records.py also reads numbers of 70 bits. */
static inline int
take_varint(const unsigned char **position, const unsigned char *end, int64_t *value)
{
    const unsigned char *at = *position;
    uint64_t raw = 0;
    for (int shift = 0; at < end; shift += 7) {
        uint64_t byte = *at++;
        if (shift == 63 && byte > 1)
            return 0;
        raw |= (byte & 127) << shift;
        if (byte < 128) {
            *value = (int64_t)(raw >> 1) ^ -(int64_t)(raw & 1);
            *position = at;
            return 1;
        }
    }
    return 0;
}

/* Encoding */

/* A bytes object or None, as a pointer and a length of -1 for None. Return 0 for anything else. */
static inline int
view_bytes(PyObject *object, const char **data, Py_ssize_t *size)
{
    if (object == Py_None) {
        *data = "";
        *size = -1;
        return 1;
    }
    if (!PyBytes_Check(object))
        return 0;
    *data = PyBytes_AS_STRING(object);
    *size = PyBytes_GET_SIZE(object);
    return 1;
}

/* Return the size of an encoded key, value or header value: a varint and the bytes. */
static inline Py_ssize_t
field_size(Py_ssize_t size)
{
    return varint_size(size) + (size > 0 ? size : 0);
}

static inline char *
put_field(char *out, const char *data, Py_ssize_t size)
{
    out = put_varint(out, size);
    if (size > 0) {
        memcpy(out, data, size);
        out += size;
    }
    return out;
}

/* A header as name and value. Return 0 if it is none, or if the name is not valid Unicode. */
static inline int
view_header(PyObject *header, const char **name, Py_ssize_t *name_size, const char **data, Py_ssize_t *size)
{
    if (!PyTuple_Check(header) || PyTuple_GET_SIZE(header) != 2 || !PyUnicode_Check(PyTuple_GET_ITEM(header, 0)))
        return 0;
    *name = PyUnicode_AsUTF8AndSize(PyTuple_GET_ITEM(header, 0), name_size);
    if (*name == NULL) {
        PyErr_Clear();
        return 0;
    }
    return view_bytes(PyTuple_GET_ITEM(header, 1), data, size);
}

typedef struct {
    int64_t timestamp;
    const char *key, *value;
    Py_ssize_t key_size, value_size;
    PyObject *headers;
    Py_ssize_t headers_size; /* encoded, with the number of headers */
} Row;

/* Fill `row` from a tuple (timestamp, key, value, headers). Return 0 if records.py must handle it. */
static inline int
view_row(PyObject *record, Row *row)
{
    if (!PyTuple_Check(record) || PyTuple_GET_SIZE(record) != 4)
        return 0;
    PyObject *timestamp = PyTuple_GET_ITEM(record, 0);
    int overflow;
    if (!PyLong_Check(timestamp))
        return 0;
    row->timestamp = PyLong_AsLongLongAndOverflow(timestamp, &overflow);
    row->headers = PyTuple_GET_ITEM(record, 3);
    if (overflow || !view_bytes(PyTuple_GET_ITEM(record, 1), &row->key, &row->key_size)
        || !view_bytes(PyTuple_GET_ITEM(record, 2), &row->value, &row->value_size)
        || !PyTuple_Check(row->headers))
        return 0;
    Py_ssize_t count = PyTuple_GET_SIZE(row->headers);
    row->headers_size = varint_size(count);
    for (Py_ssize_t i = 0; i < count; i++) {
        const char *name, *data;
        Py_ssize_t name_size, size;
        if (!view_header(PyTuple_GET_ITEM(row->headers, i), &name, &name_size, &data, &size))
            return 0;
        row->headers_size += field_size(name_size) + field_size(size);
    }
    return 1;
}

static inline char *
put_headers(char *out, PyObject *headers)
{
    Py_ssize_t count = PyTuple_GET_SIZE(headers);
    out = put_varint(out, count);
    for (Py_ssize_t i = 0; i < count; i++) {
        const char *name = NULL, *data = NULL;
        Py_ssize_t name_size = 0, size = 0;
        (void)view_header(PyTuple_GET_ITEM(headers, i), &name, &name_size, &data, &size); /* was checked */
        out = put_field(out, name, name_size);
        out = put_field(out, data, size);
    }
    return out;
}

/* Return the size of an encoded row, without the length in front of it. */
static inline Py_ssize_t
body_size(const Row *row, int64_t time_delta, int64_t offset_delta)
{
    return 1 + varint_size(time_delta) + varint_size(offset_delta) + field_size(row->key_size)
        + field_size(row->value_size) + row->headers_size;
}

/* Write a row that `view_row` has checked, with its length. `out` must have room for both. */
static inline char *
put_row(char *out, const Row *row, int64_t time_delta, int64_t offset_delta)
{
    out = put_varint(out, body_size(row, time_delta, offset_delta));
    *out++ = 0; /* attributes */
    out = put_varint(out, time_delta);
    out = put_varint(out, offset_delta);
    out = put_field(out, row->key, row->key_size);
    out = put_field(out, row->value, row->value_size);
    return put_headers(out, row->headers);
}

#endif
