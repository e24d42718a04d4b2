/* The loops of oncelog/log/index.py over the entries of an index file. The Python functions are the oracle.

   Guard: tests/log/test_log_time_index.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_big_endian.h"

enum { OFFSET_ENTRY_BYTES = 8, TIME_ENTRY_BYTES = 12 };

/* Make two arrays of these sizes. Return -1, with none of them, after an exception. */
static int
new_columns(PyObject **first, PyObject **second, Py_ssize_t first_bytes, Py_ssize_t second_bytes)
{
    *first = PyBytes_FromStringAndSize(NULL, first_bytes);
    *second = PyBytes_FromStringAndSize(NULL, second_bytes);
    if (*first != NULL && *second != NULL)
        return 0;
    Py_CLEAR(*first);
    Py_CLEAR(*second);
    return -1;
}

/* Return the result of both functions: the arrays of numbers, shortened to `count`, and the wrong entry. */
static PyObject *
columns_of(PyObject *first, PyObject *second, Py_ssize_t first_bytes, Py_ssize_t second_bytes, Py_ssize_t wrong)
{
    if (_PyBytes_Resize(&first, first_bytes) < 0 || _PyBytes_Resize(&second, second_bytes) < 0) {
        Py_XDECREF(first);
        Py_XDECREF(second);
        return NULL;
    }
    PyObject *number = wrong < 0 ? Py_NewRef(Py_None) : PyLong_FromSsize_t(wrong);
    return Py_BuildValue("(NNN)", first, second, number);
}

PyDoc_STRVAR(offset_entries_doc,
             "offset_entries(data, log_size)\n--\n\n"
             "Return the offsets and the positions in an offset index, as bytes of u32, and the first wrong entry.");

static PyObject *
offset_entries(PyObject *module, PyObject *args)
{
    Py_buffer view;
    long long log_size;
    if (!PyArg_ParseTuple(args, "y*L:offset_entries", &view, &log_size))
        return NULL;
    Py_ssize_t total = view.len / OFFSET_ENTRY_BYTES, count = 0, wrong = -1;
    PyObject *offsets, *positions, *result = NULL;
    if (new_columns(&offsets, &positions, total * 4, total * 4) < 0)
        goto done;
    const unsigned char *entry = view.buf;
    uint32_t *to_offset = (uint32_t *)PyBytes_AS_STRING(offsets);
    uint32_t *to_position = (uint32_t *)PyBytes_AS_STRING(positions);
    for (; count < total; count++, entry += OFFSET_ENTRY_BYTES) {
        uint32_t offset = u32_at(entry), position = u32_at(entry + 4);
        if (position == 0)
            break;
        if ((int64_t)position >= log_size || (count && offset <= to_offset[count - 1])) {
            wrong = count;
            break;
        }
        to_offset[count] = offset;
        to_position[count] = position;
    }
    result = columns_of(offsets, positions, count * 4, count * 4, wrong);
done:
    PyBuffer_Release(&view);
    return result;
}

PyDoc_STRVAR(time_entries_doc,
             "time_entries(data)\n--\n\n"
             "Return the timestamps and the offsets in a time index, as bytes of i64 and of u32, and the first wrong\n"
             "entry.");

static PyObject *
time_entries(PyObject *module, PyObject *data)
{
    Py_buffer view;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    Py_ssize_t total = view.len / TIME_ENTRY_BYTES, count = 0, wrong = -1;
    PyObject *timestamps, *offsets, *result = NULL;
    if (new_columns(&timestamps, &offsets, total * 8, total * 4) < 0)
        goto done;
    const unsigned char *entry = view.buf;
    int64_t *to_timestamp = (int64_t *)PyBytes_AS_STRING(timestamps);
    uint32_t *to_offset = (uint32_t *)PyBytes_AS_STRING(offsets);
    for (; count < total; count++, entry += TIME_ENTRY_BYTES) {
        int64_t timestamp = i64_at(entry);
        uint32_t offset = u32_at(entry + 8);
        if (timestamp == 0 && offset == 0) {
            /* Zeros before another entry are not preallocated. */
            const unsigned char *next = entry + TIME_ENTRY_BYTES;
            if (count == 0 && total > 1 && (i64_at(next) != 0 || u32_at(next + 8) != 0))
                wrong = 0;
            break;
        }
        if (count && (timestamp <= to_timestamp[count - 1] || offset <= to_offset[count - 1])) {
            wrong = count;
            break;
        }
        to_timestamp[count] = timestamp;
        to_offset[count] = offset;
    }
    result = columns_of(timestamps, offsets, count * 8, count * 4, wrong);
done:
    PyBuffer_Release(&view);
    return result;
}

static PyMethodDef methods[] = {
    {"offset_entries", offset_entries, METH_VARARGS, offset_entries_doc},
    {"time_entries", time_entries, METH_O, time_entries_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "oncelog.log._index", "Loops over the entries of an index file.", 0,
    methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC
PyInit__index(void)
{
    return PyModuleDef_Init(&definition);
}
