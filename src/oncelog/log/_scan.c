/* Two loops of oncelog/log/scan.py over the batches in a chunk of a log file. The Python functions are the oracle.

   Guard: tests/log/test_log_scan.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

enum { HEADER_BYTES = 61, OVERHEAD_BYTES = 12, LENGTH = 8, MAGIC = 16, CRC = 17, CRC_START = 21 };

static uint32_t
u32_at(const unsigned char *data)
{
    return (uint32_t)data[0] << 24 | (uint32_t)data[1] << 16 | (uint32_t)data[2] << 8 | data[3];
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
    return (Py_ssize_t)(int32_t)u32_at(batch + LENGTH) + OVERHEAD_BYTES;
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
        if (size < HEADER_BYTES || size > limit - position)
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

static PyMethodDef methods[] = {
    {"find_headers", find_headers, METH_VARARGS, find_headers_doc},
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
