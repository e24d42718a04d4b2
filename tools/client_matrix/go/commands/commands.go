// Package commands reads commands from standard input for a client, and writes replies. The commands are listed
// in program.py of oncelog_devtools.client_matrix.
package commands

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Missing is an error: the client does not offer this. The text says why.
type Missing string

func (reason Missing) Error() string { return string(reason) }

// ReadLimit is the time that a consumer gets to read its records.
const ReadLimit = 100 * time.Second

// Client has the calls of one client. Send calls done once, from any goroutine.
type Client interface {
	Producer(kind, argument string) error
	Send(topic string, partition int32, value string, done func(error))
	Begin() error
	Commit() error
	Abort() error
	Offsets(topic string, offset int64) error
	Consume(topic, group string, count int, isolation, protocol, instance string) ([]string, error)
	Close() error
}

// Must ends the program if there is an error.
func Must(err error) {
	if err != nil {
		panic(err)
	}
}

// Number returns the number in a text, and ends the program if it has none.
func Number(text string) int {
	number, err := strconv.Atoi(text)
	Must(err)
	return number
}

type results struct {
	mutex sync.Mutex
	order []string
	known map[string]string
}

func (r *results) set(value, result string) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if _, isKnown := r.known[value]; !isKnown {
		r.order = append(r.order, value)
	}
	r.known[value] = result
}

func (r *results) hasPending() bool {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	for _, result := range r.known {
		if result == "pending" {
			return true
		}
	}
	return false
}

func (r *results) take() (fields []string) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	var pending []string
	for _, value := range r.order {
		fields = append(fields, value+"="+r.known[value])
		if r.known[value] == "pending" {
			pending = append(pending, value)
		} else {
			delete(r.known, value)
		}
	}
	r.order = pending
	return fields
}

func (r *results) wait(limit time.Duration) {
	for end := time.Now().Add(limit); r.hasPending() && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
}

func plain(err error) string {
	text := strings.Join(strings.Fields(err.Error()), " ")
	return text[:min(len(text), 200)]
}

// Serve runs the commands on standard input. The module is that of the client, for its version.
func Serve(module string, client Client) {
	sent := &results{known: map[string]string{}}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		fields, err := run(module, client, sent, strings.Fields(lines.Text()))
		var missing Missing
		switch {
		case errors.As(err, &missing):
			fields = []string{"missing", string(missing)}
		case err != nil:
			fields = []string{"error", plain(err)}
		}
		fmt.Println(strings.Join(fields, "\t"))
	}
}

func run(module string, client Client, sent *results, words []string) ([]string, error) {
	switch words[0] {
	case "version":
		return []string{"ok", version(module)}, nil
	case "producer":
		return []string{"ok"}, client.Producer(words[1], strings.Join(words[2:], ""))
	case "send":
		for _, value := range words[3:] {
			sent.set(value, "pending")
			client.Send(words[1], int32(Number(words[2])), value, func(err error) {
				if err != nil {
					sent.set(value, plain(err))
				} else {
					sent.set(value, "ok")
				}
			})
		}
		return []string{"ok"}, nil
	case "flush":
		sent.wait(time.Duration(Number(words[1])) * time.Second)
		return append([]string{"results"}, sent.take()...), nil
	case "begin":
		return []string{"ok"}, client.Begin()
	case "commit":
		return []string{"ok"}, client.Commit()
	case "abort":
		return []string{"ok"}, client.Abort()
	case "offsets":
		return []string{"ok"}, client.Offsets(words[1], int64(Number(words[2])))
	case "consume":
		values, err := client.Consume(words[1], words[2], Number(words[3]), words[4], words[5], words[6])
		return append([]string{"records"}, values...), err
	case "close":
		return []string{"ok"}, client.Close()
	}
	return nil, fmt.Errorf("no command %s", words[0])
}

func version(module string) string {
	info, _ := debug.ReadBuildInfo()
	for _, dependency := range info.Deps {
		if dependency.Path == module {
			return dependency.Version
		}
	}
	return "unknown"
}
