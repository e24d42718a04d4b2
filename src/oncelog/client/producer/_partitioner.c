/* The hash of oncelog/client/producer/partitioner.py, which is the oracle.

   Guard: tests/wire/test_wire_row_loops.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_murmur2.h"

PyDoc_STRVAR(murmur2_doc, "murmur2(data)\n--\n\nReturn Kafka's murmur2 hash as an unsigned 32-bit number.");

static PyObject *
murmur2(PyObject *module, PyObject *key)
{
    Py_buffer view;
    if (PyObject_GetBuffer(key, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    uint32_t hash = murmur2_of(view.buf, view.len);
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(hash);
}

static PyMethodDef methods[] = {
    {"murmur2", murmur2, METH_O, murmur2_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "oncelog.client.producer._partitioner", "The hash of the default partitioner.", 0,
    methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC
PyInit__partitioner(void)
{
    return PyModuleDef_Init(&definition);
}
